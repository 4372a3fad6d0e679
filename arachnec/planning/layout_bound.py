"""What an iteration takes at least in a layout, known before anything is scheduled. In: a costed module. Out: ms.

The bound on the makespan knows which degrees fit, and what recomputing and gathering cost; the optimizer's step is
added to it. All-reduces may hide behind the last backwards. A pipeline's busiest stage waits for its first micro-batch,
and what it hands back goes through the stages before it; its all-reduce begins inside its last backward at best. The
longest micro-batch goes through all stages and back, and where there are more than pipelines, one has several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from arachnec.cost.model import CostModel
from arachnec.cost.table import Rows
from arachnec.ir.nodes import Module, Phase, Stage
from arachnec.ir.parameter_cells import cell_of, replicas
from arachnec.planning.formulate import problem_of
from arachnec.planning.pipeline_places import MicroBatch, micro_batches
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import TICKS


def least_ms(module: Module, rows: Rows | None = None) -> float:
    """ms of an iteration at least; infinite where stages hold some micro-batch at no degree. ``rows`` of costs are
    filled, and used where they are there.

    Raises UserError where a clip of a model without stages fits nowhere.
    """
    cost = CostModel(module, rows)
    parts = [stage for stage in module.stages if "part_of" in stage.attrs]
    if parts:
        least = math.inf
        for bounded in reversed(_bounds(module, cost).values()):  # more ranks are seldom slower
            least = min(least, bounded(least))
        return least + max(cost.step_time(part) for part in parts)
    makespan = lower_bound(problem_of(module, cost)) / TICKS
    return makespan + sum(cost.step_time(stage) for stage in module.stages if stage.trained)


def least_by_degree(module: Module, cost: CostModel) -> dict[int, float]:
    """ms of the cascades of stages at least, with one stage on every rank of a pipeline and one degree for all; degrees
    at which some micro-batch does not fit are left out."""
    bounds = {degree: bounded(math.inf) for degree, bounded in _bounds(module, cost).items()}
    return {degree: bound for degree, bound in bounds.items() if math.isfinite(bound)}


@dataclass(frozen=True)
class _Batches:
    """Micro-batches that cost the same. ``kinds``: stages of one kind cost the same."""

    batch: MicroBatch
    count: int
    kinds: tuple[object, ...]


def _bounds(module: Module, cost: CostModel) -> dict[int, Callable[[float], float]]:
    """By degree the bound, given a time from which on it may as well be infinite."""
    parts = [stage for stage in module.stages if "part_of" in stage.attrs]
    run = cost.cluster.world // len(parts)
    counts: Counter[tuple[object, ...]] = Counter()
    of: dict[tuple[object, ...], MicroBatch] = {}
    for batch in micro_batches(module, parts):
        shape = cost.table.shape(batch.cascades[0, Phase.FORWARD])
        counts[shape] += 1
        of.setdefault(shape, batch)
    weighted = [_Batches(of[shape], count, _kinds(cost, of[shape], len(parts))) for shape, count in counts.items()]
    cell = max(cell_of(part) or 1 for part in parts)
    degrees = (degree for degree in range(cell, run + 1, cell) if run % degree == 0)
    return {degree: partial(_at_degree, cost, parts, weighted, run, degree) for degree in degrees}


def _kinds(cost: CostModel, batch: MicroBatch, parts: int) -> tuple[object, ...]:
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)
    of = batch.cascades
    return tuple(
        tuple(cost.table.shape(of[number, phase]) for phase in phases if (number, phase) in of)
        for number in range(parts)
    )


def _at_degree(
    cost: CostModel, parts: Sequence[Stage], batches: Sequence[_Batches], run: int, degree: int, most: float
) -> float:
    times: dict[object, tuple[float, float, float] | None] = {}

    def times_of(batch: _Batches, number: int) -> tuple[float, float, float] | None:
        kind = batch.kinds[number]
        if kind not in times:
            times[kind] = _times(cost, batch.batch, number, degree)
        return times[kind]

    widest = max(batches, key=lambda one: one.batch.cascades[0, Phase.FORWARD].tokens)
    way = [times_of(widest, number) for number in range(len(parts))]
    if None in way or sum(forward + backward for forward, backward, _ in filter(None, way)) >= most:
        return math.inf
    forwards: list[list[float]] = []  # ms by micro-batch and stage
    backwards: list[list[float]] = []
    work, split = [0.0] * len(parts), [0.0] * len(parts)  # ``split``: of weight gradients, which nobody waits for
    longest = [0.0] * len(parts)  # of the backwards, weight gradients with them
    through = 0.0  # the longest way of a micro-batch to the last stage and back
    whole: list[list[tuple[float, int]]] = [[] for _ in parts]  # ms of each micro-batch on a stage, and how many
    for batch in batches:
        count = batch.count
        forward, backward = [0.0] * len(parts), [0.0] * len(parts)
        for number in range(len(parts)):
            own = times_of(batch, number)
            if own is None:
                return math.inf
            forward[number], backward[number], weight = own
            work[number] += count * (forward[number] + backward[number])
            split[number] += count * weight
            longest[number] = max(longest[number], backward[number] + weight)
            whole[number].append((forward[number] + backward[number] + weight, count))
        through = max(through, sum(forward) + sum(backward))
        forwards.append(forward)
        backwards.append(backward)
    pipelines = run // degree
    least = through
    for number, part in enumerate(parts):
        begins = min(sum(forward[:number]) for forward in forwards)
        ends = min(sum(backward[:number]) for backward in backwards)
        reduced = max(0.0, _reduce_time(cost, part, number * run, run) - longest[number])
        busy = begins + work[number] / pipelines
        least = max(least, busy + ends, busy + split[number] / pipelines + reduced)
        least = max(least, begins + fullest(whole[number], pipelines))
    return least


def fullest(durations: Sequence[tuple[float, int]], groups: int) -> float:
    """What the fullest of so many groups takes at least, given durations and how many there are of each: of the longest
    k n + 1 of them one of n groups has k + 1."""
    descending = [length for length, count in sorted(durations, reverse=True) for _ in range(count)]
    ends = range(groups + 1, len(descending) + 1, groups)
    return max((sum(descending[end - 1 - k : end]) for k, end in enumerate(ends, 1)), default=0.0)


def _reduce_time(cost: CostModel, part: Stage, first: int, run: int) -> float:
    """ms of the all-reduce of a stage's gradients on its ``run`` of ranks; of its shards between cells."""
    if not part.trained:
        return 0.0
    return cost.reduce_time(part, replicas(first, cell_of(part) or 1, tuple(range(first, first + run))))


def _times(cost: CostModel, batch: MicroBatch, number: int, degree: int) -> tuple[float, float, float] | None:
    """ms of a stage's forward, backward and weight gradients of a micro-batch; None where it does not fit."""
    forward = batch.cascades[number, Phase.FORWARD]
    blocks = cost.recompute_at(forward, degree)
    if blocks is None:
        return None

    def ms(phase: Phase, recompute: int = 0) -> float:
        cascade = batch.cascades.get((number, phase))
        return 0.0 if cascade is None else cost.time(cascade, degree, recompute=recompute)

    return cost.time(forward, degree), ms(Phase.BACKWARD, blocks), ms(Phase.WEIGHT)
