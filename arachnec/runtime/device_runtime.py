"""What the executor asks of a device: what it can do, copies beside compute, page-locked memory, marks in its queue.

Nothing else in this folder looks at a device's type: where a device cannot do something, torch's own empty streams and
events of the CPU stand in, so that all devices take one path through the code.

torch's own page-locked memory comes in powers of two. What is locked here is as large as it has to be, and lies in
pages of its own: a page can be locked once only, and small pieces of the heap share theirs.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree

from arachnec.ir.diagnostic import user_error


class _Pages(mmap.mmap):
    """Pages that are unlocked before they go back to the system: a weak reference would hear of it behind that, when
    something else may lie there."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


def locked_tensor(size: int, dtype: torch.dtype, cudart: Any) -> Tensor | None:
    """A flat tensor of ``size`` elements, not zero, unlocked when its memory is given back; None where the host has no
    more to lock. ``cudart`` is torch's module of that name."""
    pages = _Pages(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # these may be huge
    values = torch.frombuffer(pages, dtype=dtype, count=size)
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, len(pages), 0)):
        return None
    pages.unlock = lambda: cudart.cudaHostUnregister(address)
    return values


GIB = 2**30


@dataclass(frozen=True)
class Capabilities:
    """What a device can do."""

    streams: bool  # work is queued and runs after the host has gone on, copies beside compute
    pinned_memory: bool  # of the host, from which and to which copies need not wait
    event_timers: bool  # its events say when they were passed
    memory_statistics: bool  # its allocator counts
    host_memory: bool  # it has no memory but the host's


def capabilities_of(device: torch.device) -> Capabilities:
    """The capabilities of a device by torch's module for its type."""
    module = torch.get_device_module(device)
    queued = device.type not in ("cpu", "meta")
    timers = hasattr(getattr(module, "Event", None), "elapsed_time")
    return Capabilities(queued, queued, timers, hasattr(module, "max_memory_allocated"), not queued)


class Event(Protocol):
    """A mark in a device's queue of work."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def wait(self, stream: Any = None) -> None: ...


class OnHost(Protocol):
    """A value that is, or will be, in the host's memory."""

    @property
    def ready(self) -> bool:
        """Whether it is there by now."""
        ...

    def wait(self) -> Tensor:
        """The value; the calling thread waits for it."""
        ...


@dataclass(frozen=True)
class HostCopy:
    """A copy to the host on its way."""

    tensor: Tensor
    event: Event

    @property
    def ready(self) -> bool:
        return self.event.query()

    def wait(self) -> Tensor:
        if not self.ready:
            self.event.synchronize()
        return self.tensor


@dataclass(frozen=True)
class DeviceCopy:
    """Values on their way to the device: any nesting of dicts, lists and tuples with tensors in it."""

    values: Any
    event: Event
    _runtime: DeviceRuntime

    def ready(self) -> Any:
        """The values, for the current stream, which waits for them; the host does not."""
        self._runtime.wait_on_stream(self.event, self.values)
        return self.values


@dataclass(frozen=True)
class DeviceMemory:
    """GiB. ``free_is_shared``: what is neither free nor reserved is held by others, or outside the allocator."""

    total: float
    allocated: float
    reserved: float
    free: float
    free_is_shared: bool = False


def host_memory() -> DeviceMemory:
    """Of this process and this host, as far as the system says."""
    page = os.sysconf("SC_PAGE_SIZE") / GIB
    total, free = (os.sysconf(name) * page for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    statm = Path("/proc/self/statm")
    resident = int(statm.read_text().split()[1]) * page if statm.exists() else 0.0
    return DeviceMemory(total, resident, resident, free)


@dataclass(frozen=True)
class DeviceRuntime:
    """One device's streams, events and copies."""

    device: torch.device
    capabilities: Capabilities
    _module: Any
    _to_host: Any = field(repr=False)  # streams of copies
    _to_device: Any = field(repr=False)

    @classmethod
    def of(cls, device: torch.device) -> DeviceRuntime:
        module = torch.get_device_module(device)
        return cls(device, capabilities_of(device), module, module.Stream(), module.Stream())

    def record(self) -> Event:
        """A mark behind all that the current stream was given so far."""
        event: Event = self._module.Event()
        event.record()  # type: ignore[attr-defined]
        return event

    def to_host(self, value: Tensor) -> HostCopy:
        """Start copying to the host, behind what the current stream was given so far; nobody waits.

        Nobody may write to ``value`` any more: where it is on the host already, it is not copied.
        """
        if self.capabilities.host_memory and value.device == self.device:
            return HostCopy(value, self.record())
        buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=self.capabilities.pinned_memory)
        return HostCopy(buffer, self._copy(self._to_host, [(buffer, value)]))

    def pinned(self, value: Tensor) -> Tensor:
        """The same on the host, where the device copies from without anybody waiting. torch pins with the strides that
        there are, and cannot write where elements share memory, as in an expanded tensor."""
        return value.contiguous().pin_memory() if self.capabilities.pinned_memory else value

    def host_buffer(self, size: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor in the host's memory, page-locked where the device copies without anybody waiting.

        Raises ``UserError`` where the host has no more to lock.
        """
        if not self.capabilities.pinned_memory:
            return torch.empty(size, dtype=dtype)
        if not size or not hasattr(self._module, "cudart"):
            return torch.empty(size, dtype=dtype, pin_memory=True)
        values = locked_tensor(size, dtype, self._module.cudart())
        if values is None:
            raise user_error(
                f"the host gives no {size * dtype.itemsize / GIB:.2f} GiB more of page-locked memory",
                help="lower `host_memory` of the cluster to what this machine has to spare, and compile again",
            )
        return values

    def copy_in(self, target: Tensor, source: Tensor, after: Event | None = None) -> Event:
        """Start to fill ``target`` on the device from a host buffer, once the current stream has come here and
        ``after`` has passed. Nobody waits; whoever frees ``target`` has its stream wait for the copy before."""
        return self._filled(self._to_device, target, source, after)

    def copy_out(self, target: Tensor, source: Tensor, after: Event | None = None) -> Event:
        """Start to fill a host buffer likewise; whoever frees ``source`` has its stream wait before."""
        return self._filled(self._to_host, target, source, after)

    def _filled(self, stream: Any, target: Tensor, source: Tensor, after: Event | None) -> Event:
        stream.wait_stream(self._module.current_stream())
        if after is not None:
            after.wait(stream)
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)
            return self.record()

    def copying(self) -> AbstractContextManager[Any]:
        """Inside, the current stream is the one of copies to the device: what follows them does not hold up compute."""
        context: AbstractContextManager[Any] = self._module.stream(self._to_device)
        return context

    def to_device(self, values: Any) -> DeviceCopy:
        """Start copying every tensor of ``values`` to the device, beside what it computes; nobody waits."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def moved(value: Tensor) -> Tensor:
            if value.device == self.device:
                return value
            pinned = self.pinned(value)
            with self._module.stream(self._to_device):
                target = torch.empty_like(pinned, device=self.device, pin_memory=False)
            pairs.append((target, pinned))
            return target

        copies = _pytree.tree_map_only(Tensor, moved, values)
        return DeviceCopy(copies, self._copy(self._to_device, pairs, behind=False), self)

    def wait_on_stream(self, event: Event, values: Any) -> None:
        """Make the current stream wait for ``event``, and keep the memory of ``values`` until it is done with them."""
        stream = self._module.current_stream()
        event.wait(stream)
        if self.capabilities.streams:
            for value in _pytree.tree_leaves(values):
                if isinstance(value, Tensor):
                    value.record_stream(stream)

    def timer(self) -> Timer:
        """Now, as the device sees it."""
        if not self.capabilities.event_timers:
            return HostTimer(time.perf_counter())
        event = self._module.Event(enable_timing=True)
        event.record()
        return EventTimer(event)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        self._module.synchronize()

    def peak_memory(self) -> int | None:
        """Bytes allocated at most since the last reset; None where nobody counts."""
        if not self.capabilities.memory_statistics:
            return None
        return int(self._module.max_memory_allocated(self.device))

    def reset_peak_memory(self) -> None:
        """Count peaks from now on."""
        if self.capabilities.memory_statistics:
            self._module.reset_peak_memory_stats(self.device)

    def peak_reserved(self) -> int | None:
        """Bytes that the allocator held at most, in use or not; None where nobody counts."""
        if not self.capabilities.memory_statistics:
            return None
        return int(self._module.max_memory_reserved(self.device))

    def memory(self) -> DeviceMemory:
        """What is held now; of a device whose allocator does not count, what the process and the host say."""
        if not self.capabilities.memory_statistics:
            return host_memory()
        free, total = self._module.mem_get_info(self.device)
        allocated, reserved = self._module.memory_allocated(self.device), self._module.memory_reserved(self.device)
        return DeviceMemory(total / GIB, allocated / GIB, reserved / GIB, free / GIB, free_is_shared=True)

    def name(self) -> str:
        named = getattr(self._module, "get_device_name", None)
        return self.device.type if named is None else str(named(self.device))

    def _copy(self, stream: Any, pairs: list[tuple[Tensor, Tensor]], *, behind: bool = True) -> Event:
        if behind:
            stream.wait_stream(self._module.current_stream())
        with self._module.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if self.capabilities.streams and source.device == self.device:
                    source.record_stream(stream)
            return self.record()


class Timer(Protocol):
    """A moment, to be compared with another of its kind once the device has passed both."""

    def since(self, start: Any) -> float:
        """Milliseconds from ``start`` to this."""
        ...

    def passed(self) -> bool:
        """Whether the device has come to it."""
        ...


@dataclass(frozen=True)
class HostTimer:
    seconds: float

    def since(self, start: HostTimer) -> float:
        return (self.seconds - start.seconds) * 1e3

    def passed(self) -> bool:
        return True


@dataclass(frozen=True)
class EventTimer:
    event: Any

    def since(self, start: EventTimer) -> float:
        return float(start.event.elapsed_time(self.event))

    def passed(self) -> bool:
        return bool(self.event.query())
