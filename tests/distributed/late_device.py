"""A device on which every copy comes late, and whose memory is no number until it has: what reads too early is seen."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from arachnec.runtime.device_runtime import DeviceCopy, DeviceRuntime, Event, HostCopy

DELAY_S = 0.02


@dataclass
class LateEvent:
    """Passed when its copy is done."""

    passed: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(30)

    def wait(self, stream: Any = None) -> None:
        self.synchronize()  # the stream of a CPU is the thread itself


@dataclass(frozen=True)
class LateRuntime(DeviceRuntime):
    copier: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    copies: list[str] = field(default_factory=list)

    def to_host(self, value: Tensor) -> HostCopy:
        target, event = self._late(value, "to host")
        return HostCopy(target, event)

    def to_device(self, values: Any) -> DeviceCopy:
        last: list[Event] = [self.record()]

        def moved(value: Tensor) -> Tensor:
            target, last[0] = self._late(value, "to device")
            return target

        return DeviceCopy(_pytree.tree_map_only(Tensor, moved, values), last[0], self)

    def _late(self, value: Tensor, way: str) -> tuple[Tensor, LateEvent]:
        self.copies.append(way)
        target, event = torch.empty_like(value), LateEvent()
        if value.is_floating_point():
            target.fill_(float("nan"))

        def copy() -> None:
            time.sleep(DELAY_S)
            target.copy_(value)
            event.passed.set()

        self.copier.submit(copy)
        return target, event


def late_runtime() -> LateRuntime:
    """The CPU as a late device."""
    cpu = DeviceRuntime.of(torch.device("cpu"))
    return LateRuntime(cpu.device, cpu.capabilities, cpu._module, cpu._to_host, cpu._to_device)
