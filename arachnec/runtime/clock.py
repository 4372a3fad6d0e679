"""When each instruction of a rank began and ended, as its device saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # who reads a report needs no torch
    from arachnec.runtime.device_runtime import DeviceRuntime, Timer


class Interval(msgspec.Struct, frozen=True):
    """One instruction on one rank; ms from the start of the step."""

    rank: int
    op: str
    target: str
    start: float
    end: float


class Clock:
    """Measures without making anybody wait: moments are taken, and read at the end."""

    def __init__(self, rank: int, runtime: DeviceRuntime) -> None:
        self._rank = rank
        self._runtime = runtime
        self._zero = runtime.timer()
        self._marks: list[tuple[str, str, Timer, Timer]] = []
        self._passed = 0

    def measure(self, op: str, target: str) -> _Measured:
        """Run inside what is measured; of what raises nothing is noted."""
        return _Measured(self, op, target)

    def now(self) -> Timer:
        return self._runtime.timer()

    def note(self, op: str, target: str, started: Timer) -> None:
        """Something has ended that began at a ``now``."""
        self._marks.append((op, target, started, self._runtime.timer()))

    def under_way(self) -> tuple[str, str] | None:
        """Of what was measured, the operation and target that the device is in; None where it has passed all. Nobody
        waits; one other thread may ask."""
        marks = self._marks
        while self._passed < len(marks) and marks[self._passed][3].passed():
            self._passed += 1
        return marks[self._passed][:2] if self._passed < len(marks) else None

    def intervals(self) -> list[Interval]:
        """All that was measured, in order. Waits for the device."""
        self._runtime.synchronize()
        zero = self._zero
        return [Interval(self._rank, op, target, a.since(zero), b.since(zero)) for op, target, a, b in self._marks]


class _Measured:
    def __init__(self, clock: Clock, op: str, target: str) -> None:
        self._clock, self._op, self._target = clock, op, target

    def __enter__(self) -> None:
        self._started = self._clock.now()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self._clock.note(self._op, self._target, self._started)
