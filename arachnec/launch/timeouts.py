"""How long a rank may stay in a phase of the run before the run is ended, in seconds.

Each limit follows from what the phase has to do; an option sets it instead. The watchdog keeps them, so that they say
which phase it was; the timeouts of process groups lie far behind, where no healthy run comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from arachnec.ir.nodes import Module, quantity

GROUP_TIMEOUT = timedelta(days=1)
START_S = 600.0
PLAN_S = 600.0
STEP_S = 60.0
STALL_S = 60.0
STEPS_OF_ANOTHER_DEVICE_S = 600.0  # where planned times do not apply
MOST_PLANNED_S = 600.0  # of an instruction, until a step has taken longer: a plan is a claim
LONGER = 10.0  # than planned, or than measured before, is too long
DISK = 0.1  # GiB/s: a slow shared file system that is read or hashed
WRITES = 0.5  # GiB/s of a rank that writes a checkpoint, by which a grace is estimated
ENDS_S = 5.0  # that ranks take to end


@dataclass(frozen=True)
class Timeouts:
    """None: derived from the plan."""

    start: float | None = None
    plan: float | None = None
    step: float | None = None
    stall: float | None = None

    def of_start(self, module: Module) -> float:
        """To read or write weights and hash them, and to make process groups."""
        if self.start is not None:
            return self.start
        states = [quantity(program.attrs["state"]) for program in module.programs if "state" in program.attrs]
        return START_S + sum(states) / DISK

    def grace(self, module: Module, step_ms: float) -> float:
        """To end after the step under way, and to write a checkpoint: an estimate."""
        states = [quantity(program.attrs["state"]) for program in module.programs if "state" in program.attrs]
        return step_ms / 1e3 + max(states, default=0.0) / WRITES + ENDS_S

    def of_plan(self, planning_ms: float | None = None) -> float:
        """``planning_ms``: what planning took when the executable was compiled; None where that is not known, or was
        for other ranks."""
        if self.plan is not None:
            return self.plan
        return PLAN_S if planning_ms is None else STEP_S + LONGER * planning_ms / 1e3

    def of_step(self, planned_ms: float, longest_ms: float, *, first: float = 0.0, applies: bool = True) -> float:
        """``longest_ms``: of the steps before; ``first``: what compiling may add to a plan's first step."""
        if self.step is not None:
            return self.step + first
        least = STEP_S if applies else STEPS_OF_ANOTHER_DEVICE_S
        return max(least, LONGER * max(planned_ms, longest_ms) / 1e3) + first

    def of_instruction(
        self, planned_ms: float, longest_ms: float, ends_ms: float, *, first: float = 0.0, applies: bool = True
    ) -> float:
        """``longest_ms``: of the steps before, which were planned to end after ``ends_ms``; ``first`` as above.

        What the plan says counts, as much longer as the steps took than planned, up to ten minutes or such a step.
        """
        least = self.stall if self.stall is not None else STALL_S if applies else STEPS_OF_ANOTHER_DEVICE_S
        slower = max(1.0, longest_ms / ends_ms) if ends_ms else 1.0
        return least + min(slower * planned_ms / 1e3, max(MOST_PLANNED_S, longest_ms / 1e3)) + first
