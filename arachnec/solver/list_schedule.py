"""Schedules in milliseconds: choose every job's degree, then place jobs one after another where they start earliest.

Degrees: for a threshold T take the smallest area among the choices that end by T (Turek, Wolf and Yu, SPAA 1992), for
several T between the bound and half as much again. Order: by the chain behind a job, by width, or by length. Each pair
gives one schedule.

Gaps are filled here, and not by ``decoder``, which a local search calls a thousand times as often: an order found by
rule has gaps, one found by search has none. On 36 tables of ``benchmarks/plan_tables.py`` the best list schedule,
justified, is 20.8 % above the bound with gaps filled, and 22.2 % without.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from arachnec.solver.bound import horizons
from arachnec.solver.problem import Problem, Schedule

Priority = Callable[[int], tuple[float, ...]]


def list_schedules(problem: Problem, bound: int) -> Iterator[Schedule]:
    """Degrees for rising thresholds, each in every order; ``bound`` in ticks."""
    seen: set[tuple[int, ...]] = set()
    for threshold in horizons(bound):
        picks = degrees_for(problem, threshold)
        if picks not in seen:
            seen.add(picks)
            for order in orders(problem, picks):
                yield list_schedule(problem, picks, order)


def degrees_for(problem: Problem, threshold: float) -> tuple[int, ...]:
    """For every job the choice of least area that ends by the threshold, chains at their fastest; else the fastest."""
    picks = []
    for job, head, tail in zip(problem.jobs, problem.heads, problem.tails, strict=True):
        allowed = [k for k, choice in enumerate(job.choices) if head + choice.ticks + tail <= threshold]
        picks.append(min(allowed, key=lambda k: (job.choices[k].area, k)) if allowed else len(job.choices) - 1)
    return tuple(picks)


def orders(problem: Problem, picks: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders that respect precedence: by the chain behind a job, then width; by width, then length."""
    ticks = [job.choices[pick].ticks for job, pick in zip(problem.jobs, picks, strict=True)]
    degree = [job.choices[pick].degree for job, pick in zip(problem.jobs, picks, strict=True)]
    chain = list(ticks)
    widest = list(degree)
    for index in reversed(range(len(ticks))):
        for later in problem.after[index]:
            chain[index] = max(chain[index], ticks[index] + chain[later])
            widest[index] = max(widest[index], widest[later])
    keys: list[Priority] = [
        lambda j: (-chain[j], -degree[j], j),
        lambda j: (-widest[j], -chain[j], j),
        lambda j: (-degree[j] * ticks[j], -chain[j], j),
    ]
    return list(dict.fromkeys(topological(problem, key) for key in keys))


def nearest_order(problem: Problem, wished: Sequence[int]) -> tuple[int, ...]:
    """The order closest to the wished one that respects precedence."""
    position = {job: index for index, job in enumerate(wished)}
    return topological(problem, lambda j: (position[j],))


def topological(problem: Problem, key: Priority) -> tuple[int, ...]:
    """All jobs by ascending key among those whose predecessors have come."""
    missing = [len(set(job.before)) for job in problem.jobs]
    ready = [(key(j), j) for j, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, job = heapq.heappop(ready)
        order.append(job)
        for later in set(problem.after[job]):
            missing[later] -= 1
            if missing[later] == 0:
                heapq.heappush(ready, (key(later), later))
    return tuple(order)


def list_schedule(problem: Problem, picks: Sequence[int], order: Sequence[int]) -> Schedule:
    """Each job in order at the earliest moment that leaves all earlier ones where they are, gaps included."""
    starts = [0] * len(problem.jobs)
    ends = [0] * len(problem.jobs)
    profile = FreeProfile(problem.gpus)
    for index in order:
        job = problem.jobs[index]
        choice = job.choices[picks[index]]
        ready = max((ends[j] for j in job.before), default=0)
        starts[index] = profile.earliest(ready, choice.ticks, choice.degree)
        ends[index] = starts[index] + choice.ticks
        profile.hold(starts[index], ends[index], choice.degree)
    return Schedule(tuple(picks), tuple(starts))


class FreeProfile:
    """How many GPUs are free at each moment: a step function, changed in place while one schedule is made."""

    def __init__(self, gpus: int) -> None:
        self.times = [0]
        self.free = [gpus]

    def earliest(self, ready: int, ticks: int, degree: int) -> int:
        """The first moment from ``ready`` on at which ``degree`` GPUs are free for ``ticks``."""
        times, free = self.times, self.free
        position = max(0, bisect_left(times, ready + 1) - 1)
        start = ready
        while True:
            while free[position] < degree:
                position += 1
                start = times[position]
            last = position + 1
            while last < len(times) and times[last] < start + ticks:
                if free[last] < degree:
                    break
                last += 1
            else:
                return start
            position = last

    def hold(self, start: int, end: int, degree: int) -> None:
        first = self._cut(start)
        last = self._cut(end)
        for position in range(first, last):
            self.free[position] -= degree

    def _cut(self, moment: int) -> int:
        position = bisect_left(self.times, moment)
        if position == len(self.times) or self.times[position] != moment:
            self.times.insert(position, moment)
            self.free.insert(position, self.free[position - 1])
        return position
