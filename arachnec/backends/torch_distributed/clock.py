"""When each instruction of a rank began and ended, by the host's clock or, on a GPU, by its events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch


class Interval(msgspec.Struct, frozen=True):
    """One instruction on one rank; ms from the start of the step."""

    rank: int
    op: str
    target: str
    start: float
    end: float


class Clock:
    """Measures without making anybody wait: on a GPU events are recorded and read at the end."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._events = device.type == "cuda"
        self._zero = self._now()
        self._marks: list[tuple[str, str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextmanager
    def measure(self, op: str, target: str) -> Iterator[None]:
        started = self._now()
        yield
        self._marks.append((op, target, started, self._now()))

    def intervals(self) -> list[Interval]:
        """All that was measured, in order. On a GPU this waits for the device."""
        if self._events:
            torch.cuda.synchronize()
        return [Interval(self._rank, op, target, self._ms(a), self._ms(b)) for op, target, a, b in self._marks]

    def _now(self) -> float | torch.cuda.Event:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _ms(self, mark: float | torch.cuda.Event) -> float:
        zero = self._zero
        if isinstance(mark, float):
            assert isinstance(zero, float)
            return (mark - zero) * 1e3
        assert isinstance(zero, torch.cuda.Event)
        return float(zero.elapsed_time(mark))
