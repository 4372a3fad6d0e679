"""A cascade's sparse layers are those that are faster so for clips of its length.

The answer is the same in every plan, and so are the gradients. No rank could tell that a layer is missing, or one too
many: both ways of attending give a tensor of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values
from arachnec.cost.sparse_attention import ATTENDS, faster_sparse
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.names import label


@dataclass(frozen=True)
class OtherPath(Diagnostic):
    title = "{cascade} has layer {layer} {path}, which takes less time {right} by the times and densities of @{stage}"
    label = "layer {layer} is {path}"
    help = "plan again: `annotate` chooses the sparse layers of every length, the same in every plan"
    cascade: str
    layer: int
    path: str
    right: str
    stage: str


def check_sparse_paths(values: Values) -> Iterator[Diagnostic]:
    faster: dict[tuple[str, int, int], frozenset[int]] = {}
    stages = {stage.name: stage for stage in values.module.stages}
    for cascade in values.module.cascades:
        if cascade.phase not in ATTENDS:
            continue
        key = cascade.stage, cascade.tokens, cascade.text
        if key not in faster:
            faster[key] = frozenset(faster_sparse(stages[cascade.stage], cascade.tokens, cascade.text))
        others = faster[key].symmetric_difference(sparse_layers(cascade))
        if others:
            paths = ("dense", "sparse") if min(others) in faster[key] else ("sparse", "dense")
            span = cascade.attrs.span("sparse") or cascade.span
            yield OtherPath(span, label(cascade), min(others), *paths, cascade.stage)
