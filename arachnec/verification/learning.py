"""Where layers may be sparse, every rank learns the same of them, once, behind its updates.

A rank left out would choose keys by other predictors in the next step, and no shape would tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, counted
from arachnec.ir.head_density import predictor_bytes, sparse_stages
from arachnec.ir.nodes import Program

BEFORE = ("reduce", "norm", "step", "backward", "weight")


@dataclass(frozen=True)
class NotLearned(Diagnostic):
    title = "rank {rank} does not learn which keys matter as the others do: {reason}"
    label = "{reason}"
    help = "{remedy}"
    rank: int
    reason: str
    remedy: str


def check_learning(values: Values) -> Iterator[Diagnostic]:
    """One ``learn`` on every rank, of all ranks and of the first stage with predictors; none where there are none."""
    learning, cluster = list(sparse_stages(values.module).values()), values.module.cluster
    assert cluster is not None
    everyone = tuple(range(cluster.world))
    remedy = "no layer of this module has a `density`: take `learn` out"
    if learning:
        remedy = f"behind its last `step` every rank has one `learn @{learning[0].name}` on {rank_list(everyone)}"
        if not any(step.op == "learn" for program in values.module.programs for step in program.instructions):
            remedy += ". An older version wrote programs without it: compile again"
    for program in values.module.programs:
        at = [index for index, step in enumerate(program.instructions) if step.op == "learn"]
        if len(at) != bool(learning):
            span = program.instructions[at[-1]].span if at else program.span
            yield NotLearned(span, program.rank, f"it learns {counted(len(at), 'time')}", remedy)
        elif at:
            yield from _learn(program, at[0], learning[0].name, everyone, predictor_bytes(learning), remedy)


def _learn(
    program: Program, at: int, stage: str, everyone: tuple[int, ...], size: int, remedy: str
) -> Iterator[NotLearned]:
    step = program.instructions[at]
    if step.target != stage or step.peers != everyone:
        yield NotLearned(step.span, program.rank, f"it has `{written(step)}`", remedy)
    if step.attrs.get("bytes") != size:
        remedy = f"give it `bytes = {size}`, four for each of the `predictors` of the stages"
        yield NotLearned(step.span, program.rank, "the bytes are not those of all predictors", remedy)
    if any(later.op in BEFORE for later in program.instructions[at:]):
        yield NotLearned(step.span, program.rank, "a gradient or an update comes after it", remedy)
