"""What a rank's start took, part by part: from the launch to the end of the first step.

The parts follow one another, so they add up to the whole. What is not named lies in the part that comes next.
"""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field, fields
from pathlib import Path

LAUNCHED = "ARACHNEC_LAUNCHED"  # when the launcher's process began, in seconds since 1970


@dataclass(frozen=True)
class StartTimes:
    """Seconds of each part, on one rank."""

    launcher: float = 0.0  # `arachnec run` before it started the rank; the rest of its check is in `check`
    imports: float = 0.0  # the interpreter and torch
    group: float = 0.0  # meeting the other ranks, the device, the process group
    reading: float = 0.0  # the executable, the model file, the checkpoint to go on from; holding them together
    check: float = 0.0  # waiting for what `arachnec run` executes on small tensors meanwhile
    plan: float = 0.0  # waiting for the first step's plan
    weights: float = 0.0  # building the model, reading or receiving its weights; the optimizer
    blocks: float = 0.0  # capturing the blocks, shape by shape
    connections: float = 0.0  # communicators and connections of the first step
    first_step: float = 0.0  # kernels are compiled here

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))

    def text(self) -> str:
        """The parts that took at least 0.05 s, in words."""
        parts = [(part.name.replace("_", " "), getattr(self, part.name)) for part in fields(self)]
        told = ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts if seconds >= 0.05)
        return f"{self.total:.1f} s from the launch to the end of the first step: {told}"


@dataclass
class StartClock:
    """Times the parts of one rank's start, from ``since`` on."""

    since: float = field(default_factory=time.monotonic)
    _seconds: dict[str, float] = field(default_factory=dict)
    _ended: bool = False

    @classmethod
    def of_process(cls) -> StartClock:
        """Of a process that is a rank: its imports begin with itself, and its launcher may have begun before."""
        age = process_age()
        clock = cls(time.monotonic() - age)
        if (launched := os.environ.get(LAUNCHED)) is not None:
            clock._seconds["launcher"] = max(0.0, time.time() - age - float(launched))
        return clock

    def done(self, part: str) -> None:
        """All since the last call was ``part`` of ``StartTimes``. Behind the first step it does nothing."""
        if self._ended:
            return
        now = time.monotonic()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self.since
        self.since = now
        self._ended = part == "first_step"

    def times(self) -> StartTimes:
        """What is known so far."""
        return StartTimes(**{part: round(seconds, 3) for part, seconds in self._seconds.items()})


def note_launch(environment: MutableMapping[str, str]) -> None:
    """Leave word to ranks that this process may start of when it began itself."""
    environment[LAUNCHED] = f"{time.time() - process_age():.3f}"


def process_age() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        ticks = int(stat.rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
