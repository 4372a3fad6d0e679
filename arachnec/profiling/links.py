"""Latency and bandwidth of this machine's links: every rank sends a message to the next. Functions are collective."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.cost.profile import LinkProfile
from arachnec.profiling.clock import now
from arachnec.runtime.agreement import gather

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
