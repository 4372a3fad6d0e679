"""Schedules that are worth placing: the layouts that others train with.

Those of the baselines come from the files that carry their names, so that what is compared is what they do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.planning.baselines.dynamic_cp import in_dynamic_rounds
from arachnec.planning.baselines.flexsp import solved
from arachnec.planning.baselines.genetic import decode, evolve
from arachnec.planning.baselines.knapformer import best_bags, cuts
from arachnec.planning.baselines.same_bucket import bucket_by_bucket
from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.static_layouts import at_least, best_one_degree, deal


def baseline_layouts(module: Module, problem: Problem) -> Iterator[Schedule]:
    """The layouts that others train with, those that take milliseconds."""
    yield best_one_degree(problem)
    yield deal(problem, at_least(problem, 1), in_turn=True)
    yield in_dynamic_rounds(module, problem)
    yield bucket_by_bucket(module, problem)
    bags = best_bags(problem, cuts(problem.gpus))
    if bags is not None:
        yield bags


def searched_layouts(cost: CostModel, problem: Problem, seed: int, seconds: float) -> Iterator[Schedule]:
    """Those that search, each for as long: FlexSP's integer program, Arachne's genetic search at its own sizes."""
    yield from solved(problem, seconds)
    end = time.perf_counter() + seconds
    best = evolve(problem, cost.cluster, 60, 40, seed, lambda: time.perf_counter() > end)
    yield decode(problem, cost.cluster, best)[0]
