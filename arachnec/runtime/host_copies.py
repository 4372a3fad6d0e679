"""Copies between a rank's device and what it keeps in its host's memory, started and not waited for, and counted."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.runtime.device_runtime import DeviceRuntime, Event


@dataclass(frozen=True)
class Arrival:
    """A copy on its way, as the work of a collective is: to be waited for by the current stream."""

    event: Event
    runtime: DeviceRuntime

    def wait(self) -> None:
        self.runtime.wait_on_stream(self.event, ())


@dataclass
class HostCopies:
    """``from_host`` and ``to_host`` count bytes. On a CPU both sides are its memory, and the copies are real."""

    runtime: DeviceRuntime
    from_host: int = 0
    to_host: int = 0
    _leaving: tuple[Tensor, Event] | None = None  # one at a time: more would hold memory that no plan counts
    _free: list[tuple[Tensor, Event]] = field(default_factory=list)  # bytes to lend, the fewest first

    def buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in the host's memory that the device copies from and to, for good."""
        return self.runtime.host_buffer(size, dtype)

    def bring(self, target: Tensor, source: Tensor, after: Event | None = None) -> Arrival:
        """Start to fill ``target`` on the device, behind what the current stream has and ``after`` has passed."""
        self.from_host += source.numel() * source.itemsize
        return Arrival(self.runtime.copy_in(target, source, after), self.runtime)

    def take(self, target: Tensor, source: Tensor, after: Event | None = None) -> Event:
        """Start to fill ``target`` in the host's memory, behind what the current stream has and ``after`` passed."""
        self.settle()
        self.to_host += source.numel() * source.itemsize
        event = self.runtime.copy_out(target, source, after)
        self._leaving = source, event
        return event

    def counted(self) -> tuple[int, int]:
        """Bytes from the host and to it since this was asked last."""
        counts = self.from_host, self.to_host
        self.from_host = self.to_host = 0
        return counts

    def settle(self) -> None:
        """Have the current stream wait for what is on its way to the host, and give its memory back."""
        if self._leaving is not None:
            self.runtime.wait_on_stream(self._leaving[1], ())
            self._leaving = None

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Event | None]:
        """A buffer of the host for a while, and what has to have passed before it is written.

        It is the smallest free one that is large enough. Where all are too small a new one takes the place of the
        largest: what clips of many lengths need does not add up.
        """
        size = math.prod(shape) * dtype.itemsize
        place = next((n for n, (buffer, _) in enumerate(self._free) if buffer.numel() >= size), None)
        if place is not None:
            buffer, event = self._free.pop(place)
            return buffer[:size].view(dtype).view(tuple(shape)), event
        if self._free:
            self._free.pop()[1].synchronize()
        return self.buffer(size, torch.uint8).view(dtype).view(tuple(shape)), None

    def give_back(self, lent: Tensor, event: Event) -> None:
        """Once ``event`` has passed nobody reads it."""
        buffer = torch.empty(0, dtype=torch.uint8).set_(lent.untyped_storage())
        insort(self._free, (buffer, event), key=lambda pair: pair[0].numel())
