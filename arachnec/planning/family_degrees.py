"""The scheduling problem with degrees of the family of process groups alone (``analysis.group_family``).

Any degree is legal, and lower bounds count them all. But a cascade of 11 ranks needs groups that no other plan has. So
a schedule is sought among the degrees of the family first, and outside of it where that promises more than its groups
cost (``planning.family_placement``).
"""

from __future__ import annotations

from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.widths import Nested


def with_family_degrees(problem: Problem, cost: CostModel) -> Nested:
    """The problem with the family's degrees. A job that the family has no degree for keeps all of its own."""
    kept: dict[int, tuple[int, ...]] = {}
    for job in problem.jobs:
        if id(job.choices) not in kept:
            every = range(len(job.choices))
            inside = tuple(k for k in every if job.choices[k].degree in cost.family_degrees)
            kept[id(job.choices)] = inside or tuple(every)
    rows = [kept[id(job.choices)] for job in problem.jobs]
    if all(len(row) == len(job.choices) for row, job in zip(rows, problem.jobs, strict=True)):
        return Nested.all_of(problem)
    choices = {id(job.choices): tuple(job.choices[k] for k in kept[id(job.choices)]) for job in problem.jobs}
    jobs = tuple(replace(job, choices=choices[id(job.choices)]) for job in problem.jobs)
    return Nested(replace(problem, jobs=jobs), tuple(rows))


def inside(view: Nested, schedule: Schedule) -> Schedule | None:
    """A schedule of the whole problem as one of the view's; None where it has a choice that the view has not."""
    if any(pick not in kept for pick, kept in zip(schedule.picks, view.kept, strict=True)):
        return None
    picks = tuple(kept.index(pick) for pick, kept in zip(schedule.picks, view.kept, strict=True))
    return Schedule(picks, schedule.starts)
