"""Improvers that share one incumbent and one budget: whoever gains most for its effort goes on.

*Incumbent.* A schedule is first judged by what is cheap, its counted makespan, and only where that is promising by what
is dear: an ``Objective`` may place it, another simulate it. Each is at least what the one before says.

*Effort* is ms, of the wall or as counted (``budget.Clock``). An improver names the smallest slice it can use; where
that does not fit what is left, it is not called. That takes the place of limits on sizes.

*Selection.* Gain is the part of the gap, between what is reached and what nothing can be shorter than, that a call has
closed; a prover closes it from below. The
improver with the most gain for its effort so far is called, with a ``hope`` for what its next slice may bring. So
whoever was not called yet comes by its smallest slice, and those who gain nothing share the effort. It gets the time
for which its gain keeps it ahead of the next best though it gained nothing more. Without any gain its next slice is
twice as long, and its hope half as large. A prover keeps its hope, and its slices always double.

*The prover's floor.* Where there is a prover, the last ``FLOOR`` of the effort is its own, whatever the others gain: a
proof is of one schedule, and the best is known last.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from arachnec.solver.budget import Clock
from arachnec.solver.problem import TICKS, Problem, Schedule

# Of the gap, that the next slice of an improver is trusted to close.
HOPE = 0.05
# The same of improvers that can close all of it.
TRUST = 0.3
# Of the effort, the last part, that is a prover's whatever the others gain.
FLOOR = 0.3


@dataclass(frozen=True)
class Objective:
    """``measure`` gives ms of a schedule, infinite where it cannot run; ``ms`` is about what that takes."""

    name: str
    measure: Callable[[Schedule], float]
    ms: float


class Incumbent:
    """The best schedule so far. ``bound`` is in ticks, below which none ends; ``after`` the least ms that follow it.

    ``shortest`` is the one of least makespan in ticks, ``schedule`` the one of least ``length`` in ms by the dearest
    objective; without objectives the same.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: Schedule,
        bound: int,
        objectives: Sequence[Objective] = (),
        after: float = 0.0,
    ) -> None:
        self.problem, self.bound, self.objectives, self.after = problem, bound, tuple(objectives), after
        self.shortest, self.makespan = schedule, schedule.makespan(problem)
        self.schedule = schedule
        self.length = float("inf") if objectives else self.makespan / TICKS + after
        self.confirming = sum(objective.ms for objective in objectives)  # ms that the longest confirmation took

    @property
    def least(self) -> float:
        """ms that no schedule stays below."""
        return self.bound / TICKS + self.after

    @property
    def closed(self) -> bool:
        return self.makespan <= self.bound if not self.objectives else self.length <= self.least * (1 + 1e-6)

    @property
    def reach(self) -> float:
        """ms of the best: as counted, until one was confirmed."""
        return self.makespan / TICKS + self.after if self.length == float("inf") else self.length

    @property
    def gap(self) -> float:
        return max(0.0, self.reach - self.least)

    def offer(self, schedule: Schedule, clock: Clock) -> bool:
        """Whether it is the new best; where no time is left to confirm that, it is not."""
        makespan = schedule.makespan(self.problem)
        if makespan < self.makespan:
            self.shortest, self.makespan = schedule, makespan
        length = makespan / TICKS + self.after
        if length > self.length or (schedule == self.schedule and self.length < float("inf")):
            return False
        if self.objectives and (clock.left() < self.confirming or not clock.any_left()):
            return False
        before = clock.spent()
        for objective in self.objectives:
            clock.count_ms(objective.ms)
            length = objective.measure(schedule)
            if length > self.length:
                return False
        self.confirming = max(self.confirming, clock.spent() - before)
        self.schedule, self.length = schedule, length
        return True


@dataclass(frozen=True)
class Improvement:
    """What a call came to: schedules worth a look, the most promising first, and ticks below which none ends."""

    schedules: tuple[Schedule, ...] = ()
    bound: int = 0


class Improver(Protocol):
    """``hope`` is the part of the gap that its first slice is trusted to close, and any after one that gained."""

    @property
    def name(self) -> str: ...

    @property
    def hope(self) -> float: ...

    @property
    def proves(self) -> bool:
        """Whether it raises the bound."""

    def slice(self, incumbent: Incumbent) -> float | None:
        """The smallest effort it can use, in ms; None where it has nothing left to try."""

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        """What it comes to until the clock ends."""


@dataclass
class Record:
    """What an improver has gained, in parts of the gap, and spent, in ms."""

    improver: Improver
    gained: float = 0.0
    spent: float = 0.0
    longer: float = 1.0
    smallest: float = 0.0

    @property
    def slice(self) -> float:
        return self.smallest * self.longer

    @property
    def promise(self) -> float:
        """Gain for effort, if the next slice fulfils its hope."""
        return self.expected / (self.spent + self.slice)

    @property
    def expected(self) -> float:
        """What it gained, and what it is trusted to: after every call that gained nothing, half as much.

        But for a prover: that it had no answer yet says nothing.
        """
        return self.gained + self.improver.hope / (1.0 if self.improver.proves else self.longer)

    def called(self, gain: float, effort: float) -> None:
        self.gained, self.spent = self.gained + gain, self.spent + effort
        self.longer = 1.0 if gain > 0 and not self.improver.proves else 2 * self.longer


def run(improvers: Sequence[Improver], incumbent: Incumbent, clock: Clock, rng: random.Random) -> list[Record]:
    """Until the gap is closed, the budget is spent, or nobody has anything left to try; what became of the effort."""
    records = [Record(improver) for improver in improvers]
    while clock.any_left() and not incumbent.closed:
        chosen = choose(records, incumbent, clock)
        if chosen is None:
            break
        record, ms = chosen
        gap, before = incumbent.gap, clock.spent()
        improvement = record.improver.improve(incumbent, clock.slice(ms), rng)
        for schedule in improvement.schedules:
            incumbent.offer(schedule, clock)
        incumbent.bound = max(incumbent.bound, improvement.bound)
        clock.count(1)  # so that whoever counts nothing comes to an end, too
        record.called((gap - incumbent.gap) / gap if gap else 0.0, clock.spent() - before)
    return records


def choose(records: Sequence[Record], incumbent: Incumbent, clock: Clock) -> tuple[Record, float] | None:
    """Who is called next, and for how many ms; None where no slice fits what is left."""
    left = clock.left() - (incumbent.confirming if incumbent.objectives else 0.0)
    able = []
    for record in records:
        smallest = record.improver.slice(incumbent)
        if smallest is not None and smallest <= left:
            record.smallest = max(smallest, 1e-3)
            able.append(record)
    if not able:
        return None
    due = left
    for record in able:
        if record.improver.proves:
            due = left - FLOOR * (clock.spent() + left)
            if due <= 0:
                return record, left
    first, *others = sorted(able, key=lambda record: -record.promise)
    ahead = first.gained / others[0].promise - first.spent if others else left
    return first, min(max(first.slice, min(ahead, due)), left)
