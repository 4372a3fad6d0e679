"""The lower bound over every legal degree, of which schedulers try only some (``cost.degrees``).

A degree that was not tried is asked for its exact time only where it might lower the bound. Whole ranges of degrees are
ruled out by what their ranks compute at least: the widest of a range takes the least time, the narrowest the least GPU
time. A range cannot lower the bound where

* not even its widest degree ends before the bound, or
* a narrower degree that was tried is as fast, or
* a narrower degree that was tried uses no more GPU time, and fits before any end that is in question, however slow the
  cascades are that wait for it or for which it waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module
from arachnec.ir.stage_sizes import shape_of
from arachnec.solver.bound import longest_chain, lower_bound
from arachnec.solver.problem import TICKS, Choice, Job, Problem

ROUNDING = 1e-9  # relative, by which two ways to add up one time may differ


def bound_over_every_degree(module: Module, cost: CostModel, problem: Problem, bound: int) -> int:
    """Ticks below which no schedule ends, whatever its legal degrees; ``bound`` is that of the problem's degrees."""
    every = with_every_degree(module, cost, problem, bound)
    return bound if every is problem else min(bound, lower_bound(every))


def ticks_of(time: float) -> int:
    """ms in ticks as the problem counts them, rounded up."""
    return max(1, math.ceil(time * TICKS - 1e-6))


@dataclass(frozen=True)
class Shape:
    """Jobs that have their choices in common, and cost the same."""

    cascade: Cascade
    choices: tuple[Choice, ...]  # tried; ascending in degree, descending in ticks
    untried: tuple[int, ...]  # other legal degrees, ascending
    jobs: list[int]


def shapes_of(module: Module, cost: CostModel, problem: Problem) -> list[Shape]:
    """The jobs of a problem by shape, with all choices that were tried: also those that other values leave no room."""
    jobs: dict[tuple[object, ...], list[int]] = {}
    for index, cascade in enumerate(module.cascades):
        jobs.setdefault((*shape_of(cascade), id(problem.jobs[index].choices)), []).append(index)
    shapes = []
    for indices in jobs.values():
        cascade, choices = module.cascades[indices[0]], problem.jobs[indices[0]].choices
        rows = [
            Choice(degree, ticks_of(entry.time), entry.recompute)
            for degree, entry in cost.table.options(cascade).items()
        ]
        tried = set(cost.table.tried_degrees(cascade))
        untried = tuple(degree for degree in cost.legal_degrees(cascade) if degree not in tried)
        shapes.append(Shape(cascade, _descending([*choices, *rows], choices), untried, indices))
    return shapes


def with_every_degree(module: Module, cost: CostModel, problem: Problem, bound: int) -> Problem:
    """The problem with every legal degree that may lower its ``bound``; itself where there is none."""
    shapes = shapes_of(module, cost, problem)
    if all(not shape.untried and shape.choices == problem.jobs[shape.jobs[0]].choices for shape in shapes):
        return problem
    fastest = _with_choices(problem, {id(shape): (Choice(1, _fastest(shape, cost)),) for shape in shapes}, shapes)
    never = bound + 1  # ticks of what may be slower than anything tried
    slow = {id(shape): (Choice(1, _slowest(shape, never)),) for shape in shapes}
    slowest = _with_choices(problem, slow, shapes)
    work = sum(len(shape.jobs) * _least_area(shape, cost) for shape in shapes)
    low = max(longest_chain(fastest), -(-work // problem.gpus))
    every: dict[int, tuple[Choice, ...]] = {}
    for shape in shapes:
        quick = min(fastest.heads[job] + fastest.tails[job] for job in shape.jobs)
        late = max(slowest.heads[job] + slowest.tails[job] for job in shape.jobs)
        more = _helpful(shape, shape.untried, cost, bound - quick, low - late)
        every[id(shape)] = _descending([*shape.choices, *more], shape.choices)
    return _with_choices(problem, every, shapes)


def with_fastest_degree(module: Module, cost: CostModel, problem: Problem) -> Problem:
    """The problem with one more choice where a degree that was not tried may be faster than all that were."""
    shapes = shapes_of(module, cost, problem)
    if not any(shape.untried for shape in shapes):
        return problem
    faster = {
        id(shape): _descending(
            [*shape.choices, *(Choice(degree, _fastest(shape, cost)) for degree in shape.untried[-1:])], shape.choices
        )
        for shape in shapes
    }
    return _with_choices(problem, faster, shapes)


def least_ticks(cascade: Cascade, degree: int, cost: CostModel) -> int | None:
    """Ticks that a cascade computes at least at a degree or any lower one; None where it does not fit the memory."""
    recompute = cost.recompute_at(cascade, degree)
    if recompute is None:
        return None
    return math.floor(cost.least_compute(cascade, degree, 1.0, recompute=recompute) * TICKS * (1 - ROUNDING))


def _helpful(shape: Shape, degrees: Sequence[int], cost: CostModel, before: int, certain: int) -> Iterator[Choice]:
    """Choices of untried degrees that take less than ``before`` ticks and may be worth it.

    What takes up to ``certain`` ticks is possible in every schedule in question. Of a range that only GPU time rules
    out its least time stays, which what waits for the cascade may hope for.
    """
    if not degrees:
        return
    time = least_ticks(shape.cascade, degrees[-1], cost)
    if time is None or time >= before:
        return
    narrower = [choice for choice in shape.choices if choice.degree <= degrees[0]]
    if any(choice.ticks <= time for choice in narrower):
        return
    area = _least_area_from(shape.cascade, degrees[0], degrees[-1], cost)
    if any(choice.ticks <= certain and choice.area <= area for choice in narrower):
        yield Choice(degrees[-1], max(1, time))
        return
    if len(degrees) > 1:
        middle = len(degrees) // 2
        yield from _helpful(shape, degrees[:middle], cost, before, certain)
        yield from _helpful(shape, degrees[middle:], cost, before, certain)
        return
    entry = cost.table.fitting(shape.cascade, degrees[0])
    if entry is not None:
        yield Choice(degrees[0], ticks_of(entry.time), entry.recompute)


def _least_area_from(cascade: Cascade, degree: int, widest: int, cost: CostModel) -> int:
    """GPU ticks that a cascade computes at least at any degree from one to another."""
    recompute = cost.recompute_at(cascade, widest)
    if recompute is None or cascade.tokens <= 0:
        return 0
    # at most this much of it waits for the rank with the most tokens; without that GPU time only grows with the degree
    even = 1 / (1 + degree / cascade.tokens)
    time = cost.least_compute(cascade, degree, 1.0, recompute=recompute)
    return math.floor(degree * time * even * TICKS * (1 - ROUNDING))


def _least_area(shape: Shape, cost: CostModel) -> int:
    tried = min(choice.area for choice in shape.choices)
    if not shape.untried or least_ticks(shape.cascade, shape.untried[-1], cost) is None:
        return tried
    return min(tried, _least_area_from(shape.cascade, shape.untried[0], shape.untried[-1], cost))


def _fastest(shape: Shape, cost: CostModel) -> int:
    least = least_ticks(shape.cascade, shape.untried[-1], cost) if shape.untried else None
    tried = shape.choices[-1].ticks
    return tried if least is None else max(1, min(tried, least))


def _slowest(shape: Shape, never: int) -> int:
    """Ticks of the slowest degree; ``never`` where an untried one may be slower than all that were tried."""
    slowest = shape.choices[0]
    return never if shape.untried and shape.untried[0] < slowest.degree else slowest.ticks


def _descending(choices: Sequence[Choice], known: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Those that beat every narrower one; ``known`` itself where these are all of them."""
    beating: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.degree, choice.ticks)):
        if not beating or choice.ticks < beating[-1].ticks:
            beating.append(choice)
    return known if beating == list(known) else tuple(beating)


def _with_choices(problem: Problem, choices: Mapping[int, tuple[Choice, ...]], shapes: Sequence[Shape]) -> Problem:
    jobs: list[Job] = list(problem.jobs)
    for shape in shapes:
        for index in shape.jobs:
            jobs[index] = replace(jobs[index], choices=choices[id(shape)])
    return replace(problem, jobs=tuple(jobs))
