"""Rule 2, of what messages carry: both ends of a handoff, and all ranks of a collective, say the same bytes.

A program carries the bytes of every message. The simulator and the limits of a phase's time are computed with them,
and ranks that mean messages of other sizes do not understand each other. They are as many as the stages' formulas
and parameters say, or more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from arachnec.analysis.gathers import layers_listed
from arachnec.analysis.uses import Values, bucket_of, moved_by, written
from arachnec.ir.diagnostic import Diagnostic, Span
from arachnec.ir.nodes import Instruction, Stage, integer
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.stage_sizes import element_bytes, gradient_bytes, gradient_element_bytes, layers_of
from arachnec.verification.handoffs import by_pair
from arachnec.verification.memory import RELATIVE, ROUNDING_GIB, Handed

GIB = 2**30


@dataclass(frozen=True)
class UnequalBytes(Diagnostic):
    title = "rank {rank} has `{instruction}` of {size} bytes, and on rank {other} it has {expected}"
    label = "bytes = {size}"
    help = "one message has one size: write `bytes = {expected}`"
    rank: int
    instruction: str
    size: int
    other: int
    expected: int


@dataclass(frozen=True)
class TooFewBytes(Diagnostic):
    title = "rank {rank} has `{instruction}` of {size} bytes, and @{stage} says {right}"
    label = "bytes = {size}"
    help = "that follows from the stage's formulas and parameters: write at least `bytes = {right}`"
    rank: int
    instruction: str
    size: int
    stage: str
    right: int


def check_message_sizes(values: Values, handed: Mapping[Handed, float]) -> Iterator[UnequalBytes | TooFewBytes]:
    """``handed`` is what ``handed_sizes`` of the module is."""
    sends, receives = by_pair(values)
    for (source, target), received in receives.items():
        for (_, send), (_, receive) in zip(sends.get((source, target), ()), received, strict=False):
            if bytes_of(send) != bytes_of(receive) and send.target == receive.target:  # else they are matched wrongly
                texts = written(receive), bytes_of(receive), source, bytes_of(send)
                yield UnequalBytes(_at(receive), target, *texts)
    yield from _of_collectives(values)
    yield from _too_few(values, handed)


def bytes_of(step: Instruction) -> int:
    return integer(step.attrs["bytes"])


def _of_collectives(values: Values) -> Iterator[UnequalBytes]:
    first: dict[Hashable, tuple[int, Instruction]] = {}
    for program in values.module.programs:
        times: dict[Hashable, Iterator[int]] = defaultdict(count)
        for step in program.instructions:
            if step.op not in ("reduce", "gather"):
                continue
            key = step.op, step.target, step.peers, moved_by(step)
            rank, other = first.setdefault((*key, next(times[key])), (program.rank, step))
            if other is not step and bytes_of(other) != bytes_of(step):
                yield UnequalBytes(_at(step), program.rank, written(step), bytes_of(step), rank, bytes_of(other))


def _too_few(values: Values, handed: Mapping[Handed, float]) -> Iterator[TooFewBytes]:
    module = values.module
    stages = {stage.name: stage for stage in module.stages}
    stated = {node.stage: integer(node.attrs["bytes"]) for node in module.reductions if "bytes" in node.attrs}
    collected: dict[Hashable, float] = {}  # the ranks of a group have the same
    for program in module.programs:
        for step in program.instructions:
            if step.op == "receive":
                stage = values.cascades[step.target].stage
                places = ((step.target, program.rank, source) for source in (step.peers[0], None))
                right = (max(handed.get(place, 0.0) for place in places) - ROUNDING_GIB) * GIB
            elif step.op in ("reduce", "gather") and step.target not in stated and "tied" not in step.attrs:
                stage, key = step.target, (step.op, step.target, moved_by(step))
                if key not in collected:
                    collected[key] = _collected(step, stages[stage])
                right = collected[key]
            else:
                continue
            if bytes_of(step) < right * (1 - RELATIVE) - 1:
                yield TooFewBytes(_at(step), program.rank, written(step), bytes_of(step), stage, round(right))


def _collected(step: Instruction, stage: Stage) -> float:
    """Bytes of a rank's share in a reduce, or in a gather of updated parameters."""
    cell = cell_of(stage) or 1
    if step.op == "gather":
        sizes = layer_sizes(stage)
        return sum(sizes[layer].trained for layer in layers_listed(step, "layers")) * element_bytes(stage) / cell
    bucket = bucket_of(step)
    if bucket is None:
        return gradient_bytes(stage) / cell
    blocks = [parameters * gradient_element_bytes(stage) for _, parameters in layers_of(stage)]
    rest = max(0.0, gradient_bytes(stage) - sum(blocks)) if bucket[1] else 0.0
    return (sum(blocks[layer] for layer in bucket[0] if layer in range(len(blocks))) + rest) / cell


def _at(step: Instruction) -> Span | None:
    return step.attrs.span("bytes") or step.span
