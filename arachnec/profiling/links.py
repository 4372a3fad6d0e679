"""What messages take here: latency and bandwidth of links, and handoffs between ranks, alone and beside computation.

For handoffs every rank runs a block again and again and hands a value to the next rank behind each, as the stages of a
pipeline do; it waits for what comes only when the next value is on its way. What this takes longer than the same blocks
alone is the cores' time for the messages: to start them, to copy, to wake who waits.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.cost.profile import HANDOFF, Collective, LinkProfile
from arachnec.profiling.layer_collectives import Call
from arachnec.runtime.agreement import gather
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.handoffs import HandoffConnections, Handoffs, HandoffThreads, Received, TensorSpec


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


MESSAGES = (4 << 10, 32 << 20)  # bytes; the large one as pieces of gradients are, the links at their full rate
ROUNDS = 5  # behind one that warms up


def measure_links(device: torch.device) -> LinkProfile:
    """Latency and bandwidth of messages between devices, and bandwidth between the hosts' memories."""
    host = _of_times(MESSAGES, _ring_times(torch.device("cpu")))
    links = host if device.type == "cpu" else _of_times(MESSAGES, _ring_times(device))
    return msgspec.structs.replace(links, host=host.intra * dist.get_world_size())


def _ring_times(device: torch.device) -> list[float]:
    """ms of a message of each size while every rank sends one to the next: time = latency + bytes / bandwidth."""
    times = []
    for size in MESSAGES:
        outgoing = torch.zeros(size, dtype=torch.uint8, device=device)
        incoming = torch.empty_like(outgoing)
        rows = []
        for _ in range(ROUNDS + 1):
            dist.barrier()
            rows.append(_timed_exchange(outgoing, incoming, device))
        times.append(torch.stack(gather(torch.tensor(rows[1:]).median())).mean().item())
    return times


def _of_times(sizes: Sequence[int], times: Sequence[float]) -> LinkProfile:
    """Latency from the smallest message, bandwidth from the largest less the latency. Sizes in bytes, times in ms."""
    latency = min(times)
    beyond = max(times[-1] - latency, 1e-6)
    return LinkProfile(latency=latency * 1e3, intra=(sizes[-1] - sizes[0]) / beyond / 1e6)


def _timed_exchange(outgoing: Tensor, incoming: Tensor, device: torch.device) -> float:
    """ms to send to the next rank of the ring and receive from the one before."""
    world, rank = dist.get_world_size(), dist.get_rank()
    started = now(device)
    operations = [
        dist.P2POp(dist.isend, outgoing, (rank + 1) % world),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return (now(device) - started) * 1e3


SIZES = {"small": 4 << 10, "large": 1 << 20}  # bytes
COUNT = 6  # blocks, and messages, one behind the other
TAGS = {str(number): number for number in range(COUNT)}


@dataclass(frozen=True)
class HandoffTimes:
    """Of every rank to the next one. Methods are collective."""

    block: nn.Module
    call: Call
    runtime: DeviceRuntime
    now: Callable[[], float]  # in seconds
    connections: HandoffConnections
    threads: HandoffThreads = field(default_factory=HandoffThreads)

    @classmethod
    def of(cls, block: nn.Module, call: Call, device: torch.device, now: Callable[[], float]) -> HandoffTimes:
        """``block`` is not touched."""
        connections, world = HandoffConnections(), dist.get_world_size()
        connections.ensure((rank, (rank + 1) % world) for rank in range(world))
        return cls(copy.deepcopy(block), call, DeviceRuntime.of(device), now, connections)

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(f"{HANDOFF} {size}{how}" for size in SIZES for how in ("", " overlapped"))

    def run(self) -> tuple[float, ...]:
        """ms by ``phases``."""
        return tuple(ms for size in SIZES.values() for ms in self._times(size))

    def measurements(self, times: Mapping[str, float]) -> list[Collective]:
        """What the ms of each phase say. Two ranks hand a part each to the other."""
        return [
            Collective(HANDOFF, 2, 2 * size, times[f"{HANDOFF} {name}"], times[f"{HANDOFF} {name} overlapped"])
            for name, size in SIZES.items()
        ]

    def _times(self, size: int) -> tuple[float, float]:
        """ms of a message of so many bytes alone, and what a rank takes longer beside one that it sends and one that
        comes."""
        alone = self._passes(1, size, computes=False)
        beside, still = self._passes(COUNT, size), self._passes(COUNT, None)
        return alone, max(0.0, beside - still) / COUNT

    def _passes(self, count: int, size: int | None, *, computes: bool = True) -> float:
        """ms of so many blocks, forward and backward, with a message behind each if it has a ``size``."""
        world, rank = dist.get_world_size(), dist.get_rank()
        handoffs = Handoffs(self.connections, self.threads, TAGS)
        value = torch.ones(size or 0, dtype=torch.uint8, device=self.runtime.device)
        coming: list[Received] = []
        dist.barrier()
        started = self.now()
        for number in range(count):
            if size is not None:
                spec = TensorSpec((size,), torch.uint8)
                coming.append(handoffs.prefetch(str(number), spec, (rank - 1) % world))
            if computes:
                self._compute()
            if size is not None:
                handoffs.send(str(number), self.runtime.to_host(value), (rank + 1) % world)
                for received in coming[number - 1 : number]:
                    received.wait()
        handoffs.finish()
        return (self.now() - started) * 1e3

    def _compute(self) -> None:
        outputs = self.call.of_block(self.block)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
