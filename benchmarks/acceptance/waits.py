"""Which calls of the host wait for a kernel that runs on the device, as a pending receive or collective does.

What a pending collective waits for must not stand behind such a call. ``check`` takes for granted that those which the
executor makes within a step go on; the others are noted, since documentation is all that was known of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from acceptance.machine import Machine, Row

from arachnec.runtime.device_runtime import DeviceRuntime

CYCLES = 1_500_000_000  # of a kernel that does nothing else: most of a second
WAITED = 0.25  # of the kernel's time
SIZE, SMALL = 1 << 20, 1 << 10


@dataclass(frozen=True)
class Call:
    name: str
    run: Callable[[int], Any]  # gets 1 first, and then how many times the size
    in_step: bool  # the executor makes it within a step
    times: int = 1


def rows(machine: Machine) -> Iterator[Row]:
    spun = 1.0 if machine.dry else seconds(machine, lambda: None, spins=True, until_done=True)
    for call in calls(machine):
        call.run(1)  # what is made once is there
        took = seconds(machine, lambda call=call: call.run(call.times), spins=not machine.dry)
        waits = took > WAITED * spun
        row = {"call": call.name, "ms": took * 1e3, "kernel_ms": spun * 1e3, "waits": waits, "in_step": call.in_step}
        yield {**row, "right": not (waits and call.in_step)}


def calls(machine: Machine) -> tuple[Call, ...]:
    """Those of a new size ask for more than any before them."""
    device, runtime = machine.device, DeviceRuntime.of(machine.device)
    size = SMALL if machine.dry else SIZE
    here, there = torch.ones(size, device=device), torch.ones(size)
    large, there_large = torch.ones(32 * size, device=device), torch.ones(64 * size)
    pinned = runtime.pinned(there)
    locked = runtime.host_buffer(size, torch.float32)
    return (
        Call("an operation", lambda _: here + 1, True),
        Call("a mark in the queue", lambda _: runtime.record(), True),
        Call("a copy to the device from pinned memory", lambda _: runtime.to_device([pinned]), True),
        Call("a copy to the host, of a size that was copied before", lambda _: runtime.to_host(here), True),
        Call("a copy to the host, of a new size", lambda n: runtime.to_host(large[: size * n]), True, 32),
        Call("pinning a value of a new size", lambda n: runtime.pinned(there_large[: size * n]), True, 64),
        Call("a copy to locked memory", lambda _: runtime.copy_out(locked, here), True),
        Call("memory of the device, of a size that was freed before", lambda _: torch.empty(size, device=device), True),
        Call("memory of the device, of a new size", lambda n: torch.empty(size * n, device=device), True, 128),
        Call("locking host memory", lambda n: runtime.host_buffer(size * n, torch.float32), False, 2),
        Call("a value read on the host", lambda _: float(here[0]), False),
    )


def seconds(machine: Machine, call: Callable[[], Any], *, spins: bool, until_done: bool = False) -> float:
    """What a call takes the host behind a kernel that runs long; with ``until_done`` also that kernel's end."""
    machine.synchronize()
    stream = torch.cuda.Stream() if spins else None
    if stream is not None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
    started = time.perf_counter()
    call()
    if until_done:
        machine.synchronize()
    took = time.perf_counter() - started
    machine.synchronize()
    return took
