"""Schedules that are worth placing: the layouts that others train with, groups, list schedules.

Those of the rivals come from the passes that carry their names, so that what is compared is what they do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.planning.baselines.dynamic_cp import in_dynamic_rounds
from arachnec.planning.baselines.flexsp import solved
from arachnec.planning.baselines.genetic import decode, evolve
from arachnec.planning.baselines.knapformer import best_bags, cuts
from arachnec.planning.baselines.same_bucket import bucket_by_bucket
from arachnec.solver.group_rounds import in_rounds, least_loaded, power_sizes, sinks_of, ticks_at
from arachnec.solver.list_schedule import THRESHOLDS, degrees_for, list_schedule, orders
from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.static_layouts import at_least, best_one_degree, deal

EVOLVING = 1.0  # of the seconds given, for a genetic search
GENERATIONS, POPULATION = 60, 40  # of it at most
FEW = 4  # layouts, where placing one takes its time


def named_layouts(module: Module, cost: CostModel, problem: Problem, seed: int, seconds: float) -> Iterator[Schedule]:
    """The layouts that others train with; of a genetic search, as long a one as a part of ``seconds`` allows."""
    yield best_one_degree(problem)
    yield deal(problem, at_least(problem, 1), in_turn=True)
    yield in_dynamic_rounds(module, problem)
    yield bucket_by_bucket(module, problem)
    bags = best_bags(problem, cuts(problem.gpus))
    if bags is not None:
        yield bags
    if seconds > 0:
        end = time.perf_counter() + seconds * EVOLVING
        person = evolve(problem, cost.cluster, GENERATIONS, POPULATION, seed, lambda: time.perf_counter() > end)
        yield decode(problem, cost.cluster, person)[0]


def group_layouts(problem: Problem, seconds: float) -> Iterator[Schedule]:
    """One degree for all, for every degree; groups of one or two sizes filled to equal load; groups by FlexSP."""
    for degree in sorted({choice.degree for job in problem.jobs for choice in job.choices}):
        yield deal(problem, at_least(problem, degree), in_turn=False)
    ticks = ticks_at(problem, sinks_of(problem), power_sizes(problem.gpus))
    for sizes in cuts(problem.gpus):
        groups = least_loaded(ticks, sizes)
        if groups is not None:
            yield in_rounds(problem, [groups])
    if seconds > 0:
        yield from solved(problem, seconds)


def few_layouts(problem: Problem) -> Iterator[Schedule]:
    """Of the layouts that give all jobs one degree those that need least time by area and longest job, least first."""
    kinds = Counter(id(job.choices) for job in problem.jobs)
    rows = {id(job.choices): job.choices for job in problem.jobs}
    degrees = {choice.degree for row in rows.values() for choice in row}

    def least(degree: int) -> float:
        area, longest = 0, 0
        for kind, row in rows.items():
            choice = next((choice for choice in row if choice.degree >= degree), row[-1])
            area, longest = area + kinds[kind] * choice.area, max(longest, choice.ticks)
        return max(area / problem.gpus, longest)

    for degree in sorted(degrees, key=least)[:FEW]:
        yield deal(problem, at_least(problem, degree), in_turn=False)


def list_schedules(problem: Problem, bound: int) -> Iterator[Schedule]:
    """Degrees for thresholds up to twice the bound, in every order of the heuristics."""
    for factor in THRESHOLDS:
        picks = degrees_for(problem, bound * factor)
        for order in orders(problem, picks):
            yield list_schedule(problem, picks, order)
