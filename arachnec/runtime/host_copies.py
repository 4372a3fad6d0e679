"""Copies between a rank's device and what it keeps in its host's memory, started and not waited for, and counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.runtime.device_runtime import DeviceRuntime, Event
from arachnec.runtime.host_arena import HostArena, aligned

APART = 2**20  # bytes beside what is lent: each of some thousand parts begins at a round address


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
    _arena: HostArena = field(default_factory=lambda: HostArena(torch.empty(0, dtype=torch.uint8)))
    _lent: int = 0  # bytes
    _most: int = 0  # of them at once
    _read: Event | None = None  # of what was given back last: once it has passed, all before it has

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

    def reserve(self, size: int) -> None:
        """Have so many bytes to lend, or as many as were lent at once. Between steps, when a step that failed may have
        left some lent; it may wait for the device."""
        memory, size, self._lent = self._arena.memory, max(size + APART if size else 0, self._most), 0
        if size > memory.numel():
            if self._read is not None:
                self._read.synchronize()
            del memory
            self._arena = HostArena(torch.empty(0, dtype=torch.uint8))  # the host has room for one of both
            memory = self.buffer(size, torch.uint8)
        self._arena = HostArena(memory)

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Event | None]:
        """A buffer of the host for a while, and what has to have passed before it is written.

        Where more is asked for than was reserved it is locked now, and the host waits for the device.
        """
        size = math.prod(shape) * dtype.itemsize
        self._lent += aligned(size)
        self._most = max(self._most, self._lent)
        part = self._arena.lend(size)
        if part is None:
            return self.buffer(size, torch.uint8).view(dtype).view(tuple(shape)), None
        return part.view(dtype).view(tuple(shape)), self._read

    def give_back(self, lent: Tensor, event: Event) -> None:
        """Once ``event`` has passed nobody reads it. Copies to the device have one stream, so their events pass in the
        order of these calls."""
        self._lent -= aligned(lent.numel() * lent.itemsize)
        first = lent.data_ptr() - self._arena.memory.data_ptr()
        if 0 <= first < self._arena.memory.numel():
            self._arena.give_back(first, lent.numel() * lent.itemsize)
            self._read = event
