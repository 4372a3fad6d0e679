"""The ranks that share one tensor: which pieces travel between them, and how.

``Group`` is a process group. ``Counted`` has no other ranks: it counts what would be sent, on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from arachnec.kernels.attention.collectives import exchange
from arachnec.spmd.spatial.layout import Layout


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


Span = tuple[int, int]
Spans = tuple[Span, ...]  # of every factor, in order
Wanted = tuple[tuple[int, Spans], ...]  # axes, and the range of each place along it


@dataclass(frozen=True)
class Transfer:
    """What one rank does. Ranges are those of the whole tensor's factors."""

    held: Spans
    wanted: Spans
    sent: tuple[Spans | None, ...]  # by rank
    received: tuple[Spans | None, ...]
    kept: Spans | None
    collective: bool  # some rank sends something
    outside: bool  # of the tensor, in part

    @property
    def nothing(self) -> bool:
        return self.wanted == self.held and not self.collective


@lru_cache(maxsize=4096)
def transfer(spread: Layout, wanted: Wanted, index: int) -> Transfer:
    """What the rank at ``index`` sends and gets; axes that are not in ``wanted`` stay as they are."""
    ranges = dict(wanted)
    ranks = range(spread.ranks)

    def wants(rank: int) -> Spans:
        places = spread.places(rank)
        return tuple(
            ranges[f.axis][places[f.axis]] if f.axis is not None and f.axis in ranges else spread.span(f, rank)
            for f in spread.factors
        )

    def given(source: int, target: int) -> Spans | None:
        """The overlap, between ranks that are alike along all axes that cut nothing."""
        ours, theirs = spread.places(source), spread.places(target)
        if any(a != b for axis, (a, b) in enumerate(zip(ours, theirs, strict=True)) if axis not in spread.axes):
            return None
        spans = tuple(overlap(a, b) for a, b in zip(spread.held(source), wants(target), strict=True))
        return None if any(first >= end for first, end in spans) else spans

    collective = any(
        not within(overlap(spans[place], (0, factor.size)), factor.span(place))
        for axis, spans in wanted
        for factor in (spread.factor_of(axis),)
        for place in range(spread.grid[axis])
    )
    mine = wants(index)
    return Transfer(
        held=spread.held(index),
        wanted=mine,
        sent=tuple(None if rank == index else given(index, rank) for rank in ranks),
        received=tuple(None if rank == index else given(rank, index) for rank in ranks),
        kept=given(index, index),
        collective=collective,
        outside=any(f < 0 or end > factor.size for (f, end), factor in zip(mine, spread.factors, strict=True)),
    )


def overlap(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), min(a[1], b[1])


def within(a: Span, b: Span) -> bool:
    return a[0] >= a[1] or (b[0] <= a[0] and a[1] <= b[1])


def narrowed(x: Tensor, origin: Sequence[Span], spans: Sequence[Span]) -> Tensor:
    """These ranges of a tensor that begins at ``origin``."""
    for dim, ((start, _), (first, end)) in enumerate(zip(origin, spans, strict=True)):
        x = x.narrow(dim, first - start, end - first)
    return x
