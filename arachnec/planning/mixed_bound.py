"""The lower bound on nodes that differ: no GPU does more work than its kind can.

``arachnec.solver.bound`` counts GPUs as if all were the fastest. Here every kind of device has a weight, what a ms of
it is worth. A cascade of degree d on devices of one kind uses up d times its ms there times the kind's weight; a group
of several kinds takes at least the compute time of its slowest, and all its members wait so long. Whatever the weights,
the sum over all cascades of the least that each uses up is at most what all devices are worth until the end. So the
bound holds for any of them (they are the dual of a linear program that shares out the work); those taken are how fast
each kind does this work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arachnec.cluster.topology import host_of, intra_of, machine_of, machines
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module, quantity
from arachnec.ir.stage_sizes import shape_of
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import TICKS, Problem

SCALE = 1000  # weights are whole numbers, the largest about this


def bound_of(module: Module, cost: CostModel, problem: Problem) -> int:
    """Ticks below which no schedule ends, whether nodes differ or not."""
    bound = lower_bound(problem)
    return max(bound, mixed_bound(module, cost, problem, bound)) if cost.devices.kinds else bound


def mixed_bound(module: Module, cost: CostModel, problem: Problem, low: int) -> int:
    """Ticks below which no schedule ends on nodes that differ; ``low`` is a bound already."""
    shapes: dict[tuple[object, ...], list[int]] = {}
    for index, cascade in enumerate(module.cascades):
        around = problem.heads[index] + problem.tails[index]
        shapes.setdefault((shape_of(cascade), id(problem.jobs[index].choices), around), []).append(index)
    if not shapes:
        return low
    kinds = kinds_of(cost)
    members = [(module.cascades[indices[0]], len(indices)) for indices in shapes.values()]
    weights = weights_of(members, cost, kinds)
    rows = []
    for (cascade, count), indices in zip(members, shapes.values(), strict=True):
        job, around = problem.jobs[indices[0]], problem.heads[indices[0]] + problem.tails[indices[0]]
        used = least_uses(cascade, cost, kinds, weights, [choice.degree for choice in job.choices])
        rows.append([(choice.ticks + around, count * use) for choice, use in zip(job.choices, used, strict=True)])
    worth = sum(weight * len(kind.ranks) for weight, kind in zip(weights, kinds, strict=True))

    def possible(horizon: int) -> bool:
        return sum(min(use for needed, use in row if needed <= horizon) for row in rows) <= worth * horizon

    high = low
    while not possible(high):
        high *= 2
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle + 1, high)
    return low


@dataclass(frozen=True)
class Kind:
    """The ranks of one kind of device, and how much longer than the fastest it computes.

    ``packs`` says that its links within a node are no slower than those between nodes.
    """

    ranks: tuple[int, ...]
    slowdown: float
    packs: bool


def kinds_of(cost: CostModel) -> list[Kind]:
    every, inter = machines(cost.cluster), quantity(cost.cluster.attrs["inter"])
    fastest = max(machine.flops for machine in every)
    return [
        Kind(
            ranks,
            fastest / machine_of(cost.cluster, ranks[0]).flops,
            min(intra_of(cost.cluster, ranks[0]), host_of(cost.cluster, ranks[0])) >= inter,
        )
        for ranks in cost.devices.kinds
    ]


def weights_of(members: Sequence[tuple[Cascade, int]], cost: CostModel, kinds: Sequence[Kind]) -> list[int]:
    """For each kind of device how fast it does the cascades that fit on it, at their least work, against the best."""
    works = [[_least_work(cascade, cost, kind) for kind in kinds] for cascade, _ in members]
    weights = []
    for number in range(len(kinds)):
        fitting = [
            (count, min(row), row[number])
            for (_, count), row in zip(members, works, strict=True)
            if row[number] < math.inf
        ]
        total = sum(count * work for count, _, work in fitting)
        weights.append(round(SCALE * sum(count * best for count, best, _ in fitting) / total) if total > 0 else SCALE)
    return weights


def _least_work(cascade: Cascade, cost: CostModel, kind: Kind) -> float:
    """Device ms on a kind; infinite where that cannot hold the cascade."""
    degrees = (degree for degree in cost.legal_degrees(cascade) if degree <= len(kind.ranks))
    times = ((degree, least_time(cascade, cost, degree, kind, alone=True)) for degree in degrees)
    return min((degree * time for degree, time in times if time is not None), default=math.inf)


def least_uses(
    cascade: Cascade, cost: CostModel, kinds: Sequence[Kind], weights: Sequence[int], degrees: Sequence[int]
) -> list[int]:
    """Ticks times weights that a cascade uses up at least, at each degree or one up to the next that is listed."""
    smallest = []
    tried = cost.legal_degrees(cascade)
    for degree, following in zip(degrees, [*degrees[1:], math.inf], strict=True):
        uses = (use for d in tried if degree <= d < following for use in _uses(cascade, cost, d, kinds, weights))
        smallest.append(math.floor(min(uses, default=0.0) * TICKS))
    return smallest


def _uses(
    cascade: Cascade, cost: CostModel, degree: int, kinds: Sequence[Kind], weights: Sequence[int]
) -> Iterator[float]:
    """What the cascade uses up at least on one kind, or on several of which it is the slowest; for each kind."""
    for number, kind in enumerate(kinds):
        if degree <= len(kind.ranks):
            time = least_time(cascade, cost, degree, kind, alone=True)
            if time is not None:
                yield degree * weights[number] * time
        other_weights = [
            weights[k] for k, faster in enumerate(kinds) if k != number and faster.slowdown <= kind.slowdown
        ]
        if degree > 1 and other_weights:
            time = least_time(cascade, cost, degree, kind, alone=False)
            if time is not None:
                together = weights[number] + min(other_weights) + (degree - 2) * min(weights[number], *other_weights)
                yield together * time


def least_time(cascade: Cascade, cost: CostModel, degree: int, kind: Kind, *, alone: bool) -> float | None:
    """ms below which no group of so many devices ends whose slowest is of this kind; None where none can hold it.

    Where a group has several kinds, or more than a node, other ranks may use links better than packed ones: only the
    compute time is certain.
    """
    recompute = cost.recompute_at(cascade, degree, kind.ranks[:1])
    if recompute is None:
        return None
    if alone and degree <= min(len(kind.ranks), cost.cluster.gpus) and kind.packs:
        return cost.time(cascade, degree, ranks=kind.ranks[:degree], recompute=recompute)
    return cost.least_compute(cascade, degree, kind.slowdown, recompute=recompute)
