"""Values on their way from the ranks that made them to the ranks that read them.

A handoff is one message: the bytes of one tensor, whose shape the receiver knows beforehand. Messages between two
ranks are matched first in, first out; ``check`` has proved that both sides list them in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.ir.nodes import Program


@dataclass(frozen=True)
class TensorSpec:
    """Shape and precision of a handed-off tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Handoffs:
    """The sends and receives of one iteration on one rank. ``channels`` maps (from, to) to its group (None: world)."""

    def __init__(self, rank: int, device: torch.device, channels: Mapping[tuple[int, int], dist.ProcessGroup]) -> None:
        self._rank = rank
        self._device = device
        self._channels = channels
        self._sent: dict[str, list[tuple[dist.Work, Tensor]]] = {}
        self._coming: dict[str, tuple[dist.Work, Tensor]] = {}

    def send(self, name: str, value: Tensor, to: int) -> None:
        """Start sending; the value is held until ``sent`` or ``finish``."""
        flat = value.contiguous()
        work = dist.isend(_bytes(flat), to, group=self._channels.get((self._rank, to)))
        if work is not None:
            self._sent.setdefault(name, []).append((work, flat))

    def post(self, name: str, spec: TensorSpec, source: int) -> None:
        """Start receiving into a buffer of its own; does not wait."""
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        work = dist.irecv(_bytes(buffer), source, group=self._channels.get((source, self._rank)))
        assert work is not None
        self._coming[name] = (work, buffer)

    def is_coming(self, name: str) -> bool:
        """Whether a value by that name was posted and not yet waited for."""
        return name in self._coming

    def arrived(self, name: str) -> Tensor:
        """Wait for a posted value and return it."""
        work, buffer = self._coming.pop(name)
        work.wait()
        return buffer

    def sent(self, name: str) -> None:
        """Wait until the sends of this value are done with its memory."""
        for work, _ in self._sent.pop(name, []):
            work.wait()

    def finish(self) -> None:
        for name in list(self._sent):
            self.sent(name)
        for name in list(self._coming):
            self.arrived(name)


def directed_pairs(programs: Sequence[Program]) -> tuple[tuple[int, int], ...]:
    """Every (from, to) that some program sends over, sorted."""
    return tuple(sorted({(p.rank, step.peers[0]) for p in programs for step in p.instructions if step.op == "send"}))


def _bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
