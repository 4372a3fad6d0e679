"""Planned times are those of the stages' formulas: how long a run waits before it calls a rank silent rests on them.

A plan may state what was measured, so twice the formulas' time and a second are taken. Less is taken too: it ends a
run earlier, with a message. Where a stage has no formula and its cascade no measured times, nothing is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from arachnec.analysis.uses import COMPUTE, Values, gib, written
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.head_density import predictor_bytes
from arachnec.ir.nodes import Cascade, Instruction, Phase, Stage
from arachnec.ir.sampling import arrival_of
from arachnec.ir.stage_sizes import clip_time, layers_of, times_of

LONGER, SLACK_MS = 2.0, 1000.0
BACKWARDS = (Phase.TRAIN, Phase.BACKWARD, Phase.WEIGHT)


@dataclass(frozen=True)
class TimeTooLong(Diagnostic):
    kind = "time too long"
    title = "rank {rank} plans {claimed:.6g} ms for `{instruction}`, the formulas of @{stage} say {right:.6g} ms"
    label = "{claimed:.6g} ms"
    help = "a run waits as long as the plan says before it calls a rank silent; write at most `time = {most:.6g} ms`"
    rank: int
    instruction: str
    claimed: float
    stage: str
    right: float
    most: float


@dataclass(frozen=True)
class StartsTooLate(Diagnostic):
    kind = "starts too late"
    title = "rank {rank} plans `{instruction}` at {start:.6g} ms, when all cascades in turn would long have ended"
    label = "starts at {start:.6g} ms"
    help = "one after another they take {total:.6g} ms; write at most `start = {most:.6g} ms`"
    rank: int
    instruction: str
    start: float
    total: float
    most: float


def check_times(values: Values, cost: CostModel) -> Iterator[Diagnostic]:
    right = {cascade.name: _cascade(cost, cascade) for cascade in values.module.cascades}
    late = max((arrival_of(clip) for clip in values.module.clips), default=0.0)
    in_turn = math.inf if None in right.values() else sum(time for time in right.values() if time is not None) + late
    latest = _most(in_turn)
    collectives: dict[tuple[str, str, tuple[int, ...]], float] = {}
    for program in values.module.programs:
        for step in program.instructions:
            claimed, start = gib(step, "time"), gib(step, "start")
            if start > latest:
                yield StartsTooLate(step.span, program.rank, written(step), start, in_turn, latest)
            if claimed <= SLACK_MS:
                continue
            if step.op in COMPUTE:  # a forward or backward of a train cascade may take all of its time
                allowed, stage = right[step.target], values.cascades[step.target].stage
            else:
                key, stage = (step.op, step.target, step.peers), step.target
                if key not in collectives:
                    collectives[key] = _between_steps(cost, step)
                allowed = collectives[key]
            if allowed is not None and claimed > _most(allowed):
                yield TimeTooLong(step.span, program.rank, written(step), claimed, stage, allowed, _most(allowed))


def _most(ms: float) -> float:
    return LONGER * ms + SLACK_MS


def _between_steps(cost: CostModel, step: Instruction) -> float:
    """ms of what belongs to a stage, of all its layers at once; nothing else takes time of its own."""
    stage = cost.stages.get(step.target)
    if stage is None:
        return 0.0
    if step.op == "reduce":
        return cost.reduce_time(_whole(stage), step.peers)
    if step.op == "gather":
        return cost.gather_time(stage, step.peers, range(len(layers_of(stage))))
    if step.op == "learn":
        return cost.all_reduce_time(step.peers, predictor_bytes(cost.stages.values()))
    return {"norm": cost.norm_time(step.peers), "step": cost.step_time(stage)}.get(step.op, 0.0)


def _whole(stage: Stage) -> Stage:
    """With all gradients on every rank: what parts share is summed so, and takes longest."""
    return replace(stage, attrs=stage.attrs.updated(sharded=None, cell=None))


def _cascade(cost: CostModel, cascade: Cascade) -> float | None:
    if not _has_formulas(cost, cascade):
        return None
    return cost.placed_time(cascade)


def _has_formulas(cost: CostModel, cascade: Cascade) -> bool:
    measured = times_of(cascade)
    if measured:
        return cascade.width in measured
    attrs = cost.stages[cascade.stage].attrs
    if cascade.phase in BACKWARDS:
        return "forward" in attrs and "backward" in attrs
    return "forward" in attrs or clip_time(cascade) is not None
