"""A first schedule for nodes that differ: one made for as many GPUs as they are worth, judged where it is placed.

The scheduler counts GPUs as if all were the fastest. Degrees and order that suit so many are then wrong for fewer fast
and some slow ones, so that list schedules for fewer GPUs are tried as well: as many as the fastest kinds of device
have, and as many as all would be worth by their speed. ``place`` says how long each of them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, islice, takewhile

from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.planning.candidates import list_schedules
from arachnec.planning.placed_search import Measure, placing_is_quick
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import Job, Problem, Schedule

CANDIDATES = 4  # of the shortest for each number of GPUs, that are placed


def best_on_mixed(
    module: Module, cost: CostModel, problem: Problem, found: Schedule, stop: Callable[[], bool]
) -> Schedule:
    """The schedule found, or one for fewer GPUs that is shorter once it is placed, where placing is quick.

    None is tried any more once ``stop`` says so.
    """
    if stop() or not placing_is_quick(problem):
        return found
    measure = Measure(module, cost, problem)
    best, length = found, measure.of(found)
    for gpus in sorted(counts(cost)):
        for schedule in islice(schedules_for(problem, gpus, stop), CANDIDATES):
            if stop():
                return best
            reached = measure.of(schedule)
            if reached < length:
                best, length = schedule, reached
    return best


def counts(cost: CostModel) -> set[int]:
    """The GPUs of the fastest kind, of the two fastest, and so on, and what all together are worth in the fastest."""
    every = machines(cost.cluster)
    speeds = [every[node_of(cost.cluster, kind[0])].flops for kind in cost.devices.kinds]
    by_speed = sorted(zip(speeds, map(len, cost.devices.kinds), strict=True), reverse=True)
    worth = sum(speed / by_speed[0][0] * count for speed, count in by_speed)
    return {*list(accumulate(count for _, count in by_speed))[:-1], max(1, round(worth))}


def schedules_for(problem: Problem, gpus: int, stop: Callable[[], bool]) -> Iterator[Schedule]:
    """List schedules that use no more than so many GPUs, the shortest first; none where a job needs more."""
    jobs = [Job(tuple(choice for choice in job.choices if choice.degree <= gpus), job.before) for job in problem.jobs]
    if not all(job.choices for job in jobs):
        return
    fewer = Problem(tuple(jobs), gpus)
    made = takewhile(lambda _: not stop(), list_schedules(fewer, lower_bound(fewer)))
    yield from sorted(made, key=lambda schedule: schedule.makespan(fewer))
