"""The ranks that share one tensor: how they exchange pieces of it.

``Group`` is a process group. ``Counted`` has no other ranks: it counts what would be sent, on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from arachnec.kernels.attention.collectives import exchange


class Peers(Protocol):
    """Ranks in a fixed order. All call the same methods in the same order."""

    @property
    def index(self) -> int:
        """This rank's place among them."""
        ...

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """``sent[j]`` goes to rank ``j``, from which a tensor of ``shapes[j]`` comes. Of one type; any may be empty."""
        ...


@dataclass(frozen=True)
class Group:
    """Ranks of a process group."""

    ranks: tuple[int, ...]
    index: int
    group: dist.ProcessGroup | None

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        received = exchange([[piece] for piece in sent], [[shape] for shape in shapes], self.ranks, self.group)
        return [piece for (piece,) in received]


@dataclass
class Counted:
    """One rank without the others: what comes is empty memory. ``calls`` are exchanges, ``bytes`` what this rank sends
    or gets in them, whichever is more."""

    index: int
    calls: int = 0
    bytes: int = 0

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        self.calls += 1
        self.bytes += max(
            sum(piece.numel() * piece.element_size() for piece in sent),
            sum(math.prod(shape) * sent[0].element_size() for shape in shapes),
        )
        return [sent[0].new_empty(tuple(shape)) for shape in shapes]
