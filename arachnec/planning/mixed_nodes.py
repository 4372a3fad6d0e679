"""Nodes that differ, as a transformation of the problem: into ones of as many GPUs as they are worth.

The scheduler counts GPUs as if all were the fastest. Degrees and order that suit so many are then wrong for fewer fast
and some slow ones, so that problems of fewer GPUs are solved as well: as many as the fastest kinds of device have, and
as many as all would be worth by their speed. Their schedules are ones of the whole problem as they are. ``place`` says
how long each of them takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.solver.problem import Problem


def fewer_gpus(problem: Problem, cost: CostModel) -> Iterator[Problem]:
    """The problem on fewer GPUs, for every number that is worth a try; none where a job needs more."""
    for gpus in sorted(counts(cost)):
        rows = [tuple(choice for choice in job.choices if choice.degree <= gpus) for job in problem.jobs]
        if all(rows):
            jobs = (replace(job, choices=row) for job, row in zip(problem.jobs, rows, strict=True))
            yield Problem(tuple(jobs), gpus)


def counts(cost: CostModel) -> set[int]:
    """The GPUs of the fastest kind, of the two fastest, and so on, and what all together are worth in the fastest."""
    every = machines(cost.cluster)
    speeds = [every[node_of(cost.cluster, kind[0])].flops for kind in cost.devices.kinds]
    by_speed = sorted(zip(speeds, map(len, cost.devices.kinds), strict=True), reverse=True)
    worth = sum(speed / by_speed[0][0] * count for speed, count in by_speed)
    return {*list(accumulate(count for _, count in by_speed))[:-1], max(1, round(worth))}
