"""The budget of a search: wall time, or a count of work that is the same on any machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

from arachnec.solver.problem import Effort

Z3_STEPS_PER_STEP = 20_000


@dataclass(frozen=True)
class Clock:
    """The budget: wall time from ``started`` in ms, or, where ``steps`` is given, a count of work alone."""

    started: float
    budget: float
    steps: int | None = None

    def spent(self) -> float:
        """ms of wall time."""
        return (time.perf_counter() - self.started) * 1e3

    def left(self) -> float:
        """ms of wall time; without end where work is counted instead."""
        if self.steps is not None:
            return float("inf")
        return self.budget - self.spent()

    def any_left(self) -> bool:
        return self.steps > 0 if self.steps is not None else self.left() > 0

    def effort(self, wall: float) -> Effort:
        """Of one question to Z3: ``wall`` ms, or steps where the clock counts those."""
        if self.steps is not None:
            return Effort(self.steps * Z3_STEPS_PER_STEP, None)
        return Effort(None, int(wall))
