"""Schedules that are worth placing: the layouts that others train with.

Those of the baselines come from the files that carry their names, so that what is compared is what they do.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.ir.nodes import Module
from arachnec.planning.baselines.dynamic_cp import in_dynamic_rounds
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
