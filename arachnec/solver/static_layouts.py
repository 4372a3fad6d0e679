"""Schedules in which chains of jobs are dealt to fixed groups of neighbouring GPUs, as fixed layouts train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from arachnec.solver.block_packing import SMALL
from arachnec.solver.problem import Problem, Schedule

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def best_one_degree(problem: Problem) -> Schedule:
    """The shortest of the schedules that give every job one degree, over all degrees."""
    return min(one_degree(problem), key=lambda schedule: schedule.makespan(problem))


def one_degree(problem: Problem) -> Iterator[Schedule]:
    """The schedules that give every job one degree, for every degree."""
    for degree in sorted({choice.degree for job in problem.jobs for choice in job.choices}):
        yield deal(problem, at_least(problem, degree), in_turn=False)


def at_least(problem: Problem, degree: int) -> list[int]:
    """For every job its first choice of at least this degree, else its last."""
    return [
        next((k for k, choice in enumerate(job.choices) if choice.degree >= degree), len(job.choices) - 1)
        for job in problem.jobs
    ]


def deal(problem: Problem, picks: list[int], *, in_turn: bool) -> Schedule:
    """Chains of jobs dealt to runs of neighbouring GPUs, in turn or to those that are free first.

    A chain is a job that nothing waits for and all that it waits for; its jobs run one after another.
    """
    widths = [job.choices[pick].degree for job, pick in zip(problem.jobs, picks, strict=True)]
    sinks = [index for index in range(len(problem.jobs)) if not problem.after[index]]
    if not in_turn:
        sinks.sort(key=lambda j: (-widths[j], -problem.jobs[j].choices[picks[j]].ticks, j))
    free = _all_free(problem)
    starts = [-1] * len(problem.jobs)
    ends = [0] * len(problem.jobs)
    turn = 0
    for sink in sinks:
        chain = [j for j in chain_of(problem, sink) if starts[j] < 0]
        width = max(widths[j] for j in chain)
        if in_turn:
            turn = turn if turn + width <= problem.gpus else 0
            first = turn
            turn = (turn + width) % problem.gpus
        else:
            first = _first_free(free, width)
        for j in chain:
            ranks = slice(first, first + widths[j])
            ready = max((ends[i] for i in problem.jobs[j].before), default=0)
            starts[j] = max(ready, int(max(free[ranks])))
            ends[j] = starts[j] + problem.jobs[j].choices[picks[j]].ticks
            free[ranks] = [ends[j]] * widths[j]
    return Schedule(tuple(picks), tuple(starts))


def _all_free(problem: Problem) -> list[int] | NDArray[np.int64]:
    """When each GPU is free, in ticks: an array where there are many and 64 bits are enough."""
    most = sum(job.choices[0].ticks for job in problem.jobs)
    if problem.gpus <= SMALL or most >= 1 << 62:
        return [0] * problem.gpus
    import numpy as np

    return np.zeros(problem.gpus, dtype=np.int64)


def _first_free(free: list[int] | NDArray[np.int64], width: int) -> int:
    """The first GPU of the run of so many, from a multiple of it on, that is free first."""
    if isinstance(free, list):
        slots = range(0, len(free) - width + 1, width)
        return min(slots, key=lambda slot: (max(free[slot : slot + width]), slot))
    rows = free[: len(free) - len(free) % width].reshape(-1, width)
    return int(rows.max(axis=1).argmin()) * width


def chain_of(problem: Problem, sink: int) -> list[int]:
    """A job and all that it waits for, in an order in which they can run."""
    chain: dict[int, None] = {}
    waiting = [sink]
    while waiting:
        left = next((i for i in problem.jobs[waiting[-1]].before if i not in chain), None)
        if left is None:
            chain[waiting.pop()] = None
        else:
            waiting.append(left)
    return list(chain)
