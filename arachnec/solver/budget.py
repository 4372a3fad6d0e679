"""What a search may spend, in ms: of the wall, or, where steps are counted, of work that is the same on any machine.

A step stands for about a millisecond. Whoever works counts what it does; by the wall that changes nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace

from arachnec.solver.problem import Effort

# An operation is a job of a list schedule, decoded in 0.7 to 2 us of Python.
OPERATIONS_PER_MS = 1000
# By Z3's own count, on questions of solver.z3_proof.
Z3_STEPS_PER_MS = 2500
# Times what decoding takes, of a list schedule: it fills gaps.
LISTED = 2
# ms of list schedules and layouts, or of a bound, that there is time for whatever the budget: 100 list schedules of 100
# jobs.
GRACE = 20.0


@dataclass
class Work:
    """What was counted so far, in ms."""

    ms: float = 0.0


@dataclass(frozen=True)
class Clock:
    """Wall time from ``started`` up to ``budget`` ms, or, where ``steps`` is given, that much counted work instead."""

    started: float
    budget: float
    steps: float | None = None
    work: Work = field(default_factory=Work, compare=False)

    def wall(self) -> float:
        """ms of wall time since the start."""
        return (time.perf_counter() - self.started) * 1e3

    def spent(self) -> float:
        return self.wall() if self.steps is None else self.work.ms

    def left(self) -> float:
        return (self.budget if self.steps is None else self.steps) - self.spent()

    def any_left(self) -> bool:
        return self.left() > 0

    def count(self, operations: float) -> None:
        """So many operations, about a microsecond each."""
        self.work.ms += operations / OPERATIONS_PER_MS

    def count_z3(self, steps: int) -> None:
        self.count_ms(steps / Z3_STEPS_PER_MS)

    def count_ms(self, ms: float) -> None:
        self.work.ms += ms

    def slice(self, ms: float) -> Clock:
        """This clock, ending after so many ms more, or when it would."""
        end = self.spent() + min(ms, self.left())
        return replace(self, budget=end) if self.steps is None else replace(self, steps=end)

    def effort(self, ms: float | None = None) -> Effort:
        """Of one question to Z3: so many ms, or all that is left."""
        ms = max(1.0, self.left() if ms is None else min(ms, self.left()))
        return Effort(None, int(ms)) if self.steps is None else Effort(int(ms * Z3_STEPS_PER_MS), None)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
