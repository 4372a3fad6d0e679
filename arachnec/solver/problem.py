"""The scheduling problem, stripped to numbers: moldable jobs, and GPUs that are interchangeable.

The clock is in microseconds, times rounded up, so that everything is a whole number and Z3 exact. ``place`` says later
which GPUs; any set will do, since jobs whose number is never too large at any moment can always be given GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

TICKS = 1000  # per ms


def least_possible(possible: Callable[[int], bool], low: int) -> int:
    """The least number from ``low`` on that is possible, as all larger ones are."""
    if possible(low):
        return low
    high = 2 * max(low, 1)
    while not possible(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Choice:
    """One way to run a job: on ``degree`` GPUs for ``ticks``."""

    degree: int
    ticks: int
    recompute: int = 0  # blocks

    @property
    def area(self) -> int:
        return self.degree * self.ticks


@dataclass(frozen=True)
class Job:
    """``choices`` ascend in degree and strictly descend in ticks; ``before`` are the jobs it waits for."""

    choices: tuple[Choice, ...]
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Jobs in an order in which every job stands after those it waits for.

    ``widths`` are those of the aligned blocks in which packings hold GPUs, each a divisor of the next; powers of 2
    without.
    """

    jobs: tuple[Job, ...]
    gpus: int
    widths: tuple[int, ...] | None = None

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        waiting: list[list[int]] = [[] for _ in self.jobs]
        for index, job in enumerate(self.jobs):
            for earlier in job.before:
                waiting[earlier].append(index)
        return tuple(tuple(row) for row in waiting)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Ticks before which each job cannot start: its longest chain of predecessors, each at its fastest."""
        heads: list[int] = []
        for job in self.jobs:
            heads.append(max((heads[j] + self.jobs[j].choices[-1].ticks for j in job.before), default=0))
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """Ticks that must follow each job's end: its longest chain of successors, each at its fastest."""
        tails = [0] * len(self.jobs)
        for index in reversed(range(len(self.jobs))):
            for later in self.after[index]:
                tails[index] = max(tails[index], tails[later] + self.jobs[later].choices[-1].ticks)
        return tuple(tails)


@dataclass(frozen=True)
class Schedule:
    """For every job the index of its choice and its start in ticks."""

    picks: tuple[int, ...]
    starts: tuple[int, ...]

    def makespan(self, problem: Problem) -> int:
        ends = (
            start + job.choices[pick].ticks
            for job, pick, start in zip(problem.jobs, self.picks, self.starts, strict=True)
        )
        return max(ends, default=0)


def violations(problem: Problem, schedule: Schedule) -> list[str]:
    """Every way in which a schedule breaks its problem; empty when it is valid."""
    wrong: list[str] = []
    events: list[tuple[int, int]] = []
    ends: list[int] = []
    for index, (job, pick, start) in enumerate(zip(problem.jobs, schedule.picks, schedule.starts, strict=True)):
        choice = job.choices[pick]
        ends.append(start + choice.ticks)
        events += [(start, choice.degree), (ends[-1], -choice.degree)]
        if start < 0:
            wrong.append(f"job {index} starts at {start}")
        wrong += [f"job {index} starts before job {j} ends" for j in job.before if schedule.starts[index] < ends[j]]
    held = 0
    for tick, change in sorted(events):
        held += change
        if held > problem.gpus:
            wrong.append(f"{held} of {problem.gpus} GPUs are held at tick {tick}")
            break
    return wrong


@dataclass(frozen=True)
class Solution:
    """A schedule with what is known of how good it is; bounds in ticks.

    ``area_bound`` is the bound that needs no search, ``bound`` the best one proved; ``proved`` where that is met.
    ``first_ms`` is when the first complete schedule was there, from the start of the clock.
    """

    schedule: Schedule
    area_bound: int
    bound: int
    proved: bool
    first_ms: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Effort:
    """What one query may cost: Z3's own deterministic count of steps, and wall time in ms; None is no limit."""

    steps: int | None = None
    wall_ms: int | None = None
