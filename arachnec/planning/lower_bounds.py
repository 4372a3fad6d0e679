"""Lower bounds of a module: on nodes that differ, and the parts that the bound consists of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from arachnec.cluster.topology import host_of, intra_of, machine_of, machines
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module, quantity
from arachnec.ir.sampling import on_one_side
from arachnec.ir.stage_sizes import shape_of
from arachnec.ir.values import Quantity, Value
from arachnec.planning.formulate import problem_of
from arachnec.solver.bound import longest_chain, lower_bound
from arachnec.solver.problem import TICKS, Choice, Problem, least_possible

SCALE = 1000  # weights are whole numbers, the largest about this


def bound_of(module: Module, cost: CostModel, problem: Problem) -> int:
    """Ticks below which no schedule ends, whether nodes differ or not."""
    return mixed_bound(module, cost, problem) if cost.devices.kinds else lower_bound(problem)


def mixed_bound(module: Module, cost: CostModel, problem: Problem) -> int:
    """Ticks below which no schedule ends on nodes that differ.

    ``arachnec.solver.bound`` counts GPUs as if all were the fastest. Here every kind of device has a weight, what a ms
    of it is worth. A cascade of degree d on devices of one kind uses up d times its ms there times the kind's weight. A
    group of several kinds may share tokens by their speeds: it takes at least as long as its devices together, each at
    its own speed and all the time, and a device uses up at least its part of the work times its weight over its speed.
    Whatever the weights, the sum over all cascades of the least that each uses up is at most what all devices are worth
    until the end. So the bound holds for any of them (they are the dual of a linear program that shares out the work);
    those taken are how fast each kind does this work.
    """
    kinds = kinds_of(cost)
    cascades = [cascade.with_attrs(shards=None) for cascade in module.cascades]  # others are possible
    problem = _relaxed(cascades, cost, problem, kinds)
    low = lower_bound(problem)
    shapes: dict[tuple[object, ...], list[int]] = {}
    for index, cascade in enumerate(cascades):
        around = problem.heads[index] + problem.tails[index]
        shapes.setdefault((shape_of(cascade), id(problem.jobs[index].choices), around), []).append(index)
    if not shapes:
        return low
    members = [(cascades[indices[0]], len(indices)) for indices in shapes.values()]
    weights = weights_of(members, cost, kinds)
    rows = []
    for (cascade, count), indices in zip(members, shapes.values(), strict=True):
        job, around = problem.jobs[indices[0]], problem.heads[indices[0]] + problem.tails[indices[0]]
        used = least_uses(cascade, cost, kinds, weights, [choice.degree for choice in job.choices])
        rows.append([(choice.ticks + around, count * use) for choice, use in zip(job.choices, used, strict=True)])
    worth = sum(weight * len(kind.ranks) for weight, kind in zip(weights, kinds, strict=True))

    def possible(horizon: int) -> bool:
        return sum(min(use for needed, use in row if needed <= horizon) for row in rows) <= worth * horizon

    return least_possible(possible, low)


def _relaxed(cascades: Sequence[Cascade], cost: CostModel, problem: Problem, kinds: Sequence[Kind]) -> Problem:
    """The problem with the least that each degree may take: groups of several kinds share tokens by their speeds."""
    choices: dict[int, tuple[Choice, ...]] = {}
    for cascade, job in zip(cascades, problem.jobs, strict=True):
        if id(job.choices) not in choices:
            choices[id(job.choices)] = tuple(_least_choices(cascade, cost, kinds)) or job.choices
    return replace(problem, jobs=tuple(replace(job, choices=choices[id(job.choices)]) for job in problem.jobs))


def _least_choices(cascade: Cascade, cost: CostModel, kinds: Sequence[Kind]) -> Iterator[Choice]:
    """Of every legal degree that is faster than those before it."""
    fastest = math.inf
    for degree in cost.legal_degrees(cascade):
        time = min(_least_times(cascade, cost, degree, kinds), default=math.inf)
        if time < math.inf and (ticks := max(1, math.floor(time * TICKS))) < fastest:
            yield Choice(degree, ticks)
            fastest = ticks


def _least_times(cascade: Cascade, cost: CostModel, degree: int, kinds: Sequence[Kind]) -> Iterator[float]:
    """ms below which no group of so many devices ends, of one kind each or of all."""
    for kind in kinds:
        if degree <= len(kind.ranks):
            time = least_time(cascade, cost, degree, kind)
            if time is not None:
                yield time
    speeds = sorted((1 / kind.slowdown for kind in kinds for _ in kind.ranks), reverse=True)[:degree]
    for fixed, divided in _shared_work(cascade, cost, degree, kinds):
        yield fixed + divided / math.fsum(speeds)


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
    times = ((degree, least_time(cascade, cost, degree, kind)) for degree in degrees)
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
    """What the cascade uses up at least on one kind, for each, or on several together."""
    for kind, weight in zip(kinds, weights, strict=True):
        if degree <= len(kind.ranks):
            time = least_time(cascade, cost, degree, kind)
            if time is not None:
                yield degree * weight * time
    per_work = min(weight * kind.slowdown for kind, weight in zip(kinds, weights, strict=True))
    for fixed, divided in _shared_work(cascade, cost, degree, kinds) if degree > 1 else ():
        yield degree * min(weights) * fixed + per_work * divided


def _shared_work(
    cascade: Cascade, cost: CostModel, degree: int, kinds: Sequence[Kind]
) -> Iterator[tuple[float, float]]:
    """For every number of clips side by side: ms that each of a group's devices waits at least whatever its speed, and
    ms of the fastest device for all that they compute. None where so many cannot hold the cascade.

    The fullest device is at best one with most memory, with an even share.
    """
    recompute = cost.recompute_at(cascade, degree, kinds[0].ranks[:1])
    if recompute is None:
        return
    for side in cost.sides(cascade, degree):
        one, ranks = on_one_side(cascade, side), degree // side
        time, slower = (cost.least_compute(one, ranks, slowdown, recompute=recompute) for slowdown in (1.0, 2.0))
        yield max(0.0, 2 * time - slower), degree * (slower - time)


def least_time(cascade: Cascade, cost: CostModel, degree: int, kind: Kind) -> float | None:
    """ms below which no group of so many devices of this kind ends; None where none can hold it.

    Where a group lies on more than a node, other ranks may use links better than packed ones: only the compute time is
    certain.
    """
    recompute = cost.recompute_at(cascade, degree, kind.ranks[:1])
    if recompute is None:
        return None
    if degree <= min(len(kind.ranks), cost.cluster.gpus) and kind.packs:
        return cost.time(cascade, degree, ranks=kind.ranks[:degree], recompute=recompute)
    return cost.least_compute(cascade, degree, kind.slowdown, recompute=recompute)


PLENTY = 1e12  # GB/s or GiB
Cause = Literal["work", "chain", "wide"]


@dataclass(frozen=True)
class BoundParts:
    """The area bound of a module's cascades in ms, and its causes.

    ``cause`` is what no schedule that were any shorter could keep: all the ``work`` within the GPUs, the longest
    ``chain`` of cascades at their fastest, or that cascades which need more than half of the GPUs are one after
    another, ``wide``.
    """

    bound: float
    cause: Cause
    work: float  # each cascade at its least area, over all GPUs
    longest: float  # the longest chain, each at its fastest
    chain: tuple[str, ...]  # the cascades of that chain
    without_memory: float  # the bound, if memory limited nothing
    without_precedence: float  # if no cascade waited for another
    without_communication: float  # if links cost no time


def bound_parts(module: Module) -> BoundParts:
    """Of a module at level costed or later. Raises UserError where a cascade fits the memory at no degree."""
    cost = CostModel(module)
    problem = problem_of(module, cost)
    bound = bound_of(module, cost, problem)
    alone = Problem(tuple(replace(job, before=()) for job in problem.jobs), problem.gpus)
    work = sum(min(choice.area for choice in job.choices) for job in problem.jobs) / problem.gpus
    slower = bound > lower_bound(problem)  # some of the GPUs, which is what bounds it
    return BoundParts(
        bound=bound / TICKS,
        cause="work" if slower else _cause(problem, bound - 1),
        work=(bound if slower else work) / TICKS,
        longest=longest_chain(problem) / TICKS,
        chain=tuple(module.cascades[index].name for index in _chain(problem)),
        without_memory=_bound(_roomy(module)) / TICKS,
        without_precedence=bound_of(module, cost, alone) / TICKS,
        without_communication=_bound(_with_free_links(module)) / TICKS,
    )


def _bound(module: Module) -> int:
    cost = CostModel(module)
    return bound_of(module, cost, problem_of(module, cost))


def _roomy(module: Module) -> Module:
    """The module on devices on which every degree fits and nothing recomputes."""
    assert module.cluster is not None
    attrs = module.cluster.attrs
    sizes: dict[str, Value] = {"memory": Quantity(PLENTY, "GiB")}
    mixed = attrs.get("mixed")
    if isinstance(mixed, tuple):
        sizes["mixed"] = tuple(_with_plenty(row, "GiB") for row in mixed)
    return replace(module, cluster=replace(module.cluster, attrs=attrs.updated(**sizes)))


def _with_free_links(module: Module) -> Module:
    """The module on a cluster whose links, within nodes and between them, cost nothing."""
    assert module.cluster is not None
    attrs = module.cluster.attrs
    rates: dict[str, Value] = {
        name: Quantity(PLENTY, "GB/s") for name in ("intra", "inter", "uplink", "host_link") if name in attrs
    }
    delays = {name: Quantity(0.0, "us") for name in ("latency", "inter_latency")}
    mixed = attrs.get("mixed")
    if isinstance(mixed, tuple):
        rates["mixed"] = tuple(_with_plenty(row, "GB/s") for row in mixed)
    return replace(module, cluster=replace(module.cluster, attrs=attrs.updated(**rates, **delays)))


def _with_plenty(row: Value, unit: str) -> Value:
    """A kind of nodes, with as much as one likes of what is measured in this unit."""
    assert isinstance(row, tuple), "the table of the cluster's attributes says so"
    return tuple(
        Quantity(PLENTY, unit) if isinstance(value, Quantity) and value.unit == unit else value for value in row
    )


def _cause(problem: Problem, horizon: int) -> Cause:
    """What cannot be true of a schedule that ends at ``horizon``, which is below the bound."""
    wide = 0
    for job, head, tail in zip(problem.jobs, problem.heads, problem.tails, strict=True):
        allowed = [choice for choice in job.choices if head + choice.ticks + tail <= horizon]
        if not allowed:
            return "chain"
        wide += job.choices[-1].ticks if 2 * allowed[0].degree > problem.gpus else 0
    return "wide" if wide > horizon else "work"


def _chain(problem: Problem) -> list[int]:
    """The jobs of the longest chain, first to last; the first such chain of several."""
    if not problem.jobs:
        return []
    fastest = [job.choices[-1].ticks for job in problem.jobs]
    job = max(range(len(fastest)), key=lambda index: problem.heads[index] + fastest[index])
    path = [job]
    while problem.jobs[job].before:
        job = max(problem.jobs[job].before, key=lambda index: problem.heads[index] + fastest[index])
        path.append(job)
    return path[::-1]
