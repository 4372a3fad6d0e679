"""Degrees and an order of all jobs, decoded to a schedule again and again as a search changes a few of them.

In order, every job takes the GPUs it needs among those that are free when it can start first, those that have been idle
shortest. No GPU's idle time is filled later, yet nothing is lost by that: the jobs of an optimal schedule, in order of
start, decode to one as short (each can still start where it did). A GPU is thus one number, the moment from which it
is free, and a job costs a microsecond of Python.

What a search minimises is the work above a horizon that it sets below the shortest schedule it knows: unlike the
makespan, that falls with every job that is drawn below it. Three things make a try cheap. It begins at the first
position that changed, from a snapshot on the way there. It ends where more lies above the horizon than the search would
accept, or where so much idle time is lost below it that the rest must reach as far above. And work that is too much in
sum is not decoded at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.solver.problem import Job, Problem, Schedule

Snapshot: TypeAlias = tuple[list[int], int, int, int]  # when each GPU is free, ascending; idle, above, last


@dataclass(frozen=True, slots=True)
class Decoded:
    """``above`` is GPU time in ticks above the horizon, ``last`` the makespan, ``ends`` of every job."""

    above: int
    last: int
    ends: list[int]
    snapshots: list[Snapshot]


class Decoder:
    """One order with degrees, changed in place; ``now`` is what it was last known to decode to."""

    def __init__(self, problem: Problem, picks: Sequence[int], order: Sequence[int]) -> None:
        self.problem, self.gpus = problem, problem.gpus
        self.before = [tuple(set(job.before)) for job in problem.jobs]
        self.after = [tuple(set(after)) for after in problem.after]
        self.picks, self.order = list(picks), list(order)
        self.position = [0] * len(self.order)
        for position, job in enumerate(self.order):
            self.position[job] = position
        chosen = [job.choices[pick] for job, pick in zip(problem.jobs, self.picks, strict=True)]
        self.ticks = [choice.ticks for choice in chosen]
        self.degrees = [choice.degree for choice in chosen]
        self.area = sum(choice.area for choice in chosen)
        self.every = math.isqrt(len(self.order)) + 1  # jobs between two snapshots: as many as there are snapshots
        self.aim(sum(self.ticks))

    def aim(self, horizon: int) -> None:
        """Another horizon; all is decoded anew."""
        self.horizon = horizon
        self.now = Decoded(0, 0, [0] * len(self.order), [([0] * self.gpus, 0, 0, 0)])
        decoded = self.decode(0, math.inf)
        assert decoded is not None
        self.now = decoded

    def set_pick(self, job: int, pick: int) -> None:
        choice = self.problem.jobs[job].choices[pick]
        self.area += choice.area - self.degrees[job] * self.ticks[job]
        self.picks[job], self.ticks[job], self.degrees[job] = pick, choice.ticks, choice.degree

    def move(self, job: int, to: int) -> None:
        """The job to another position, which lies within its ``span``."""
        order, position = self.order, self.position
        old = position[job]
        del order[old]
        order.insert(to, job)
        for index in range(min(old, to), max(old, to) + 1):
            position[order[index]] = index

    def span(self, job: int) -> tuple[int, int]:
        """The first and last position of a job behind what it waits for and ahead of what waits for it."""
        position = self.position
        first, last = 0, len(position) - 1
        for earlier in self.before[job]:
            if position[earlier] >= first:
                first = position[earlier] + 1
        for later in self.after[job]:
            if position[later] <= last:
                last = position[later] - 1
        return first, last

    def decode(self, first: int, limit: float) -> Decoded | None:
        """With changes from position ``first`` on; None where more than ``limit`` would be above the horizon."""
        room = self.gpus * self.horizon - self.area + limit  # of idle time below the horizon
        known = first // self.every
        free, idle, above, last = self.now.snapshots[known]
        if room < idle or above > limit:
            return None
        order, degrees, ticks, before, horizon = self.order, self.degrees, self.ticks, self.before, self.horizon
        free, ends = free[:], self.now.ends[:]
        snapshots = self.now.snapshots[: known + 1]
        begin = known * self.every
        following = begin + self.every
        for position in range(begin, len(order)):
            if position == following:
                snapshots.append((free[:], idle, above, last))
                following += self.every
            job = order[position]
            degree = degrees[job]
            start = free[degree - 1]
            for earlier in before[job]:
                if ends[earlier] > start:
                    start = ends[earlier]
            end = start + ticks[job]
            until = bisect_right(free, start, degree - 1)  # the GPUs free by then
            if start <= horizon:
                idle += degree * start - (free[until - 1] if degree == 1 else sum(free[until - degree : until]))
                if idle > room:
                    return None
            if end > horizon:
                above += degree * (end - (start if start > horizon else horizon))
                if above > limit:
                    return None
            if degree == 1:
                del free[until - 1]
                free.insert(bisect_left(free, end), end)
            else:
                del free[until - degree : until]
                place = bisect_left(free, end)
                free[place:place] = [end] * degree
            ends[job] = end
            if end > last:
                last = end
        return Decoded(above, last, ends, snapshots)

    def schedule(self) -> Schedule:
        return Schedule(tuple(self.picks), tuple(map(int.__sub__, self.now.ends, self.ticks)))


def start_order(schedule: Schedule) -> list[int]:
    return sorted(range(len(schedule.starts)), key=lambda j: (schedule.starts[j], j))


def reversed_problem(problem: Problem) -> Problem:
    """The problem whose schedules are those of this one from end to beginning; its jobs have the reverse order."""
    last = len(problem.jobs) - 1
    return Problem(
        tuple(
            Job(job.choices, tuple(sorted(last - later for later in after)))
            for job, after in zip(reversed(problem.jobs), reversed(problem.after), strict=True)
        ),
        problem.gpus,
        problem.widths,
    )


def reversed_schedule(problem: Problem, schedule: Schedule) -> Schedule:
    """Of a schedule of ``problem`` the one of its reverse."""
    length = schedule.makespan(problem)
    runs = zip(problem.jobs, schedule.picks, schedule.starts, strict=True)
    starts = tuple(length - start - job.choices[pick].ticks for job, pick, start in runs)
    return Schedule(schedule.picks[::-1], starts[::-1])


def justified(problem: Problem, schedule: Schedule) -> Schedule:
    """All jobs as late as they can run in the order of their ends, then as early, and so on while that is shorter.

    Justification: Valls, Ballestin and Quintanilla, EJOR 2005.
    """
    backwards = reversed_problem(problem)
    while True:
        late = left_shifted(backwards, reversed_schedule(problem, schedule))
        early = left_shifted(problem, reversed_schedule(backwards, late))
        if early.makespan(problem) >= schedule.makespan(problem):
            return schedule
        schedule = early


def left_shifted(problem: Problem, schedule: Schedule) -> Schedule:
    """Every job, in the order of the starts, as early as GPUs are free; never longer."""
    return Decoder(problem, schedule.picks, start_order(schedule)).schedule()
