"""Which pieces of a tensor travel between ranks, where every rank wants other ranges of it than it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from arachnec.spmd.spatial.layout import Layout

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
