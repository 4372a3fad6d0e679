"""What waiting adds to the lower bound: jobs of one chain share the time, and chains leave GPUs idle at both ends.

A chain here is a job that nothing waits for, and all that it waits for. The bound is the least T for which this can be
true, and must be in a schedule that ends by T:

* every chain has choices with which it fits into T. ``arachnec.solver.bound`` gives each job the time that the others
  leave at their fastest; here they have to agree, and the chain's least area is that of the best agreement;
* these areas sum to at most what the GPUs can do by T. A chain's first jobs hold no more GPUs than their largest
  degree, and others can hold some only once those can have ended; from the end it is the same backwards. Where chains
  are few, or few GPUs can share a stage, that leaves GPUs idle.

Areas fall as T grows and what the GPUs can do rises, so bisection finds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

from arachnec.solver.budget import GRACE, OPERATIONS_PER_MS
from arachnec.solver.problem import Choice, Problem, least_possible

Frontier: TypeAlias = list[tuple[int, int]]  # ticks, ascending, and the least area within them, descending
Widths: TypeAlias = list[tuple[int, int]]  # ticks, ascending, from which on so many GPUs can be held


def chain_bound(problem: Problem, low: int) -> int:
    """Ticks below which no schedule ends, given that ``low`` are.

    That is ``low`` itself where a job is waited for by several, or chains are of too many kinds.
    """
    if not any(job.before for job in problem.jobs) or any(len(set(after)) > 1 for after in problem.after):
        return low
    kinds, members = _kinds(problem)
    if len(kinds) * low.bit_length() > GRACE * OPERATIONS_PER_MS:  # bisection asks each kind once for every bit
        return low
    frontiers = [(_frontier(problem, members[sink]), count) for sink, count in kinds.items()]
    early = _total([(_widths(problem, members[sink], problem.heads), count) for sink, count in kinds.items()])
    late = _total([(_widths(problem, members[sink], problem.tails), count) for sink, count in kinds.items()])

    def possible(horizon: int) -> bool:
        area = 0
        for frontier, count in frontiers:
            position = bisect_right(frontier, horizon, key=lambda point: point[0])
            if position == 0:
                return False
            area += frontier[position - 1][1] * count
        return area <= usable(problem.gpus, early, late, horizon)

    return least_possible(possible, low)


def usable(gpus: int, early: Widths, late: Widths, horizon: int) -> int:
    """GPU time in ticks that chains can use by ``horizon``: ``early`` counts ticks from 0 on, ``late`` from the end."""
    marks = {0, horizon} | {ticks for ticks, _ in early if ticks < horizon}
    times = sorted(marks | {horizon - ticks for ticks, _ in late if ticks < horizon})
    total = 0
    for begin, end in pairwise(times):
        total += (end - begin) * min(gpus, _width(early, begin), _width(late, horizon - end))
    return total


def _width(widths: Widths, ticks: int) -> int:
    return widths[bisect_right(widths, ticks, key=lambda step: step[0]) - 1][1]


def _kinds(problem: Problem) -> tuple[Counter[int], dict[int, list[int]]]:
    """Of every kind of chain one last job and how many there are, and the jobs of that chain."""
    names: dict[tuple[object, ...], int] = {}
    kind: list[int] = []
    for job in problem.jobs:
        kind.append(names.setdefault((job.choices, *sorted(kind[i] for i in set(job.before))), len(names)))
    first: dict[int, int] = {}
    count: Counter[int] = Counter()
    members: dict[int, list[int]] = {}
    for index in range(len(problem.jobs)):
        if not problem.after[index]:
            sink = first.setdefault(kind[index], index)
            count[sink] += 1
    for sink in first.values():
        members[sink] = _members(problem, sink)
    return count, members


def _members(problem: Problem, last: int) -> list[int]:
    """A job and all that it waits for, each behind what it waits for itself. A chain may have thousands."""
    members = [last]
    for index in members:
        members += set(problem.jobs[index].before)
    return members[::-1]


def _frontier(problem: Problem, members: Iterable[int]) -> Frontier:
    """Of the last of these jobs and all that it waits for."""
    known: dict[int, Frontier] = {}
    for index in members:
        job = problem.jobs[index]
        known[index] = _falling(_behind(job.choices, _parallel([known.pop(i) for i in set(job.before)])))
    return known.popitem()[1]


def _parallel(frontiers: Sequence[Frontier]) -> Frontier:
    """Of chains that run at one time."""
    if not frontiers:
        return [(0, 0)]
    least = max(frontier[0][0] for frontier in frontiers)
    moments = sorted({ticks for frontier in frontiers for ticks, _ in frontier if ticks >= least})
    return [
        (moment, sum(f[bisect_right(f, moment, key=lambda point: point[0]) - 1][1] for f in frontiers))
        for moment in moments
    ]


def _behind(choices: Iterable[Choice], before: Frontier) -> Frontier:
    return sorted((ticks + choice.ticks, area + choice.area) for choice in choices for ticks, area in before)


def _falling(points: Frontier) -> Frontier:
    falling: Frontier = []
    for ticks, area in points:
        if not falling or area < falling[-1][1]:
            falling.append((ticks, area))
    return falling


def _widths(problem: Problem, members: Sequence[int], ready: Sequence[int]) -> Widths:
    """How many GPUs the jobs of a chain can hold at most, each from its ``ready`` ticks on."""
    widths: Widths = []
    own, widest = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
    for moment, jobs in groupby(sorted(members, key=ready.__getitem__), key=ready.__getitem__):
        for job in jobs:
            own[job] = problem.jobs[job].choices[-1].degree
            at = job
            while (now := max(own[at], sum(widest[i] for i in set(problem.jobs[at].before)))) > widest[at]:
                widest[at] = now
                at = next(iter(problem.after[at]), at)  # what waits for it can be as wide
        widths.append((moment, widest[members[-1]]))
    return widths


def _total(chains: Iterable[tuple[Widths, int]]) -> Widths:
    """Of all chains together, from 0 ticks on."""
    rises: Counter[int] = Counter({0: 0})
    for widths, count in chains:
        before = 0
        for ticks, width in widths:
            rises[ticks] += (width - before) * count
            before = width
    total: Widths = []
    width = 0
    for ticks in sorted(rises):
        width += rises[ticks]
        total.append((ticks, width))
    return total
