"""What a rank keeps in its host's memory: copies that nobody waits for, inputs of blocks, an optimizer's masters.

A call that locks memory returns only when every kernel of the device has ended, also a collective that waits for its
peers. So what a program needs is locked before its first step.

Inputs of blocks that run again go out behind the block that reads them. When the backward comes to a block its inputs
are there: those of the block before start their way back at that moment, while this one computes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.runtime.device_runtime import DeviceRuntime, Event

ALIGNED = 256  # bytes, as the device's copies like them


@dataclass
class HostArena:
    """``memory`` is flat, of bytes. Parts are lent from where the first of enough bytes is free."""

    memory: Tensor
    _free: list[tuple[int, int]] = field(init=False)  # first byte and one behind the last, ascending

    def __post_init__(self) -> None:
        self._free = [(0, self.memory.numel())] if self.memory.numel() else []

    def lend(self, size: int) -> Tensor | None:
        """So many bytes; None where no free part is that large."""
        taken = aligned(size)
        for number, (first, end) in enumerate(self._free):
            if end - first >= taken:
                self._free[number : number + 1] = [(first + taken, end)] if end - first > taken else []
                return self.memory[first : first + size]
        return None

    def give_back(self, first: int, size: int) -> None:
        """The part that begins at byte ``first``; joined with its free neighbours."""
        end = first + aligned(size)
        insort(self._free, (first, end))
        place = bisect_left(self._free, (first, end))
        if place + 1 < len(self._free) and self._free[place + 1][0] == end:
            self._free[place : place + 2] = [(first, self._free[place + 1][1])]
        if place and self._free[place - 1][1] == first:
            self._free[place - 1 : place + 1] = [(self._free[place - 1][0], self._free[place][1])]


def aligned(size: int) -> int:
    """Bytes that a part of ``size`` takes."""
    return -(-size // ALIGNED) * ALIGNED


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


@dataclass(eq=False)
class _Kept:
    """One input: in the host, on its way back, or back."""

    buffer: Tensor
    gone: Event
    before: _Kept | None  # the one that goes out before; needed after it, or before it by the same block
    here: tuple[Tensor, Arrival] | None = None
    read: bool = False  # its buffer may hold another one by now


@dataclass
class HostInputs:
    """Of one rank; ``put`` and ``get`` are what autograd calls when it saves an input, and when it needs it again."""

    copies: HostCopies
    _last: _Kept | None = field(default=None, repr=False)

    @torch.no_grad()
    def put(self, value: Tensor) -> object:
        """Take an input out of the device's memory."""
        buffer, free = self.copies.lend(value.shape, value.dtype)
        self._last = _Kept(buffer, self.copies.take(buffer, value, free), self._last)
        return self._last

    @torch.no_grad()
    def get(self, kept: object) -> Tensor:
        """Have it back on the device, once, and the one before it on its way."""
        assert isinstance(kept, _Kept) and not kept.read
        self._start(kept)
        if kept.before is not None:
            self._start(kept.before)
        assert kept.here is not None
        value, arrival = kept.here
        arrival.wait()
        kept.here = None
        kept.before = None
        kept.read = True
        return value

    def begin(self) -> None:
        """A cascade's forward begins: what others have kept is none of its."""
        self._last = None

    def _start(self, kept: _Kept) -> None:
        if kept.here is not None or kept.read:
            return
        device = self.copies.runtime.device
        value = torch.empty(kept.buffer.shape, dtype=kept.buffer.dtype, device=device)
        arrival = self.copies.bring(value, kept.buffer, kept.gone)
        self.copies.give_back(kept.buffer, arrival.event)
        kept.here = value, arrival


@dataclass
class HostMasters:
    """``taken`` and ``rounded`` are buffers in the host, of gradients and of parameters, made at their first use."""

    copies: HostCopies
    _taken: dict[str, Tensor] = field(default_factory=dict)
    _rounded: dict[str, Tensor] = field(default_factory=dict)
    _arrivals: list[Arrival] = field(default_factory=list)

    def master(self, parameter: Tensor) -> Tensor:
        """A copy in the host of at least fp32, as a parameter of the optimizer."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        copy = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        return torch.nn.Parameter(copy.copy_(parameter.detach()))

    @torch.no_grad()
    def gradients(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients in the host; the host waits for them."""
        for name, value in given.items():
            if name not in self._taken:
                self._taken[name] = self.copies.buffer(value.numel(), value.dtype)
            event = self.copies.take(self._taken[name].view(value.shape), value)
        self.copies.settle()
        if given:
            event.synchronize()
        return {name: self._taken[name].view(value.shape) for name, value in given.items()}

    @torch.no_grad()
    def bring(self, name: str, target: Tensor, master: Tensor) -> None:
        """Start to fill a tensor on the device from its master, rounded in the host; the current stream waits."""
        if name not in self._rounded:
            self._rounded[name] = self.copies.buffer(target.numel(), target.dtype)
        rounded = self._rounded[name].view(target.shape)
        rounded.copy_(master)
        self.copies.bring(target, rounded).wait()
