"""Heads divided unevenly over the ranks of a clip, some of them cut between queries.

In: which queries of which heads each rank computes. Out: the all-to-all of queries, keys and values to these ranks, and
that of the output back. A rank gets all keys and values of its heads; of a head that is cut its own queries alone, and
zeros stand for the others. Gradients go the same ways; those of keys and values are summed in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.collectives import accumulator, exchange
from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split, offsets

Counts = tuple[tuple[int, ...], ...]  # tokens of each part of the sequence at each rank


@dataclass(frozen=True, eq=False)
class HeadShare:
    """A head, or of one that is cut the query groups ``first`` to ``end`` - 1 and their ``rows``: places in the
    sequence, [n] int64, ascending, on the host. ``rows`` is None for a whole head, ``end`` where it has no groups."""

    head: int
    rows: Tensor | None = None
    first: int = 0
    end: int | None = None


Division = tuple[tuple[HeadShare, ...], ...]
"""By rank of the clip; whole heads stand before those that are cut."""


def whole_heads(total: int, ranks: int) -> Division:
    """Runs of heads by number, as even as can be."""
    sizes = even_split(total, ranks)
    firsts = offsets(sizes)
    return tuple(tuple(map(HeadShare, range(a, a + n))) for a, n in zip(firsts, sizes, strict=True))


def held_ranges(parts: Counts, holder: int) -> tuple[tuple[int, int], ...]:
    """Where the holder's tokens stand in the whole sequence, all parts in order."""
    ranges, start = [], 0
    for part in parts:
        first = start + sum(part[:holder])
        ranges.append((first, first + part[holder]))
        start += sum(part)
    return tuple(ranges)


@functools.lru_cache(maxsize=1 << 14)
def _cut_rows(share: HeadShare, parts: Counts, holder: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A cut share's rows that the holder has: their places in the sequence, and among its tokens. Once a share, so that
    layers and steps that divide their heads alike find them on the device."""
    assert share.rows is not None
    places, local, before = [], [], 0
    for first, end in held_ranges(parts, holder):
        a, b = torch.searchsorted(share.rows, torch.tensor([first, end])).tolist()
        places.append(share.rows[a:b])
        local.append(share.rows[a:b] - first + before)
        before += end - first
    return on_device(torch.cat(places), device), on_device(torch.cat(local), device)


class DividedHeads:
    """Who needs and who holds what of queries, keys and values, or of the output. Moves as
    ``arachnec.kernels.attention.exchange`` does, whose autograd functions take it."""

    def __init__(self, division: Division, cut: Sequence[bool], parts: Sequence[Counts], shard: SequenceShard) -> None:
        """``cut``: whether a tensor has only a share's rows of a head that is cut. ``parts`` as in
        ``tokens_to_heads``, by tensor."""
        self.division, self.cut, self.parts = division, tuple(cut), tuple(parts)
        self.me, self.ranks, self.group = shard.index, shard.ranks, shard.group

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        peers = range(len(self.ranks))
        send = [[piece for x, plan in self._plans(tensors) for piece in plan.of_rank(x, j, self.me)] for j in peers]
        shapes = [[s for x, plan in self._plans(tensors) for s in plan.shapes(x, self.me, i)] for i in peers]
        received = [iter(pieces) for pieces in exchange(send, shapes, self.ranks, self.group)]
        return [plan.joined_tokens(x, self.me, received) for x, plan in self._plans(tensors)]

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        peers = range(len(self.ranks))
        send = [[piece for x, plan in self._plans(tensors) for piece in plan.of_tokens(x, self.me, j)] for j in peers]
        shapes = [[s for x, plan in self._plans(tensors) for s in plan.shapes(x, i, self.me)] for i in peers]
        received = [iter(pieces) for pieces in exchange(send, shapes, self.ranks, self.group)]
        plans = zip(self._plans(tensors), heads, strict=True)
        return [plan.joined_heads(x, total, self.me, received) for (x, plan), total in plans]

    def _plans(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, _OfTensor]]:
        rows = zip(tensors, self.cut, self.parts, strict=True)
        return [(x, _OfTensor(self.division, cut, parts)) for x, cut, parts in rows]


@dataclass(frozen=True)
class _OfTensor:
    """The pieces of one tensor. A ``holder`` has tokens of all heads, an ``owner`` shares of heads."""

    division: Division
    cut: bool
    parts: Counts

    def shapes(self, x: Tensor, owner: int, holder: int) -> list[tuple[int, ...]]:
        whole, cut = self._split(owner)
        held = sum(part[holder] for part in self.parts)
        rows = [self._rows(share, holder, x) for share in cut]
        return [(x.shape[0], len(whole), held, x.shape[3]), *((x.shape[0], len(r[0]), x.shape[3]) for r in rows)]

    def of_rank(self, x: Tensor, owner: int, holder: int) -> list[Tensor]:
        """From all heads of the holder's tokens, what the owner needs."""
        whole, cut = self._split(owner)
        heads = torch.cat([x[:, :0], *(x[:, share.head : share.head + 1] for share in whole)], 1)
        return [heads, *(x[:, share.head, self._rows(share, holder, x)[1]] for share in cut)]

    def joined_tokens(self, x: Tensor, owner: int, received: Sequence[Iterator[Tensor]]) -> Tensor:
        whole, cut = self._split(owner)
        total = sum(map(sum, self.parts))
        make = x.new_zeros if cut else x.new_empty
        out = make(x.shape[0], len(self.division[owner]), total, x.shape[3])
        for holder, pieces in enumerate(received):
            piece, local = next(pieces), 0
            for first, end in held_ranges(self.parts, holder):
                out[:, : len(whole), first:end] = piece[:, :, local : local + end - first]
                local += end - first
            for place, share in enumerate(cut, len(whole)):
                rows = self._rows(share, holder, x)[0]
                out[:, place].index_copy_(1, rows, next(pieces))
        return out

    def of_tokens(self, x: Tensor, owner: int, holder: int) -> list[Tensor]:
        """From the owner's heads of all tokens, what the holder has."""
        whole, cut = self._split(owner)
        heads = torch.cat([x[:, : len(whole), first:end] for first, end in held_ranges(self.parts, holder)], 2)
        rows = [self._rows(share, holder, x)[0] for share in cut]
        return [heads, *(x[:, place, r] for place, r in enumerate(rows, len(whole)))]

    def joined_heads(self, x: Tensor, total: int, holder: int, received: Sequence[Iterator[Tensor]]) -> Tensor:
        """Of all heads. Where several ranks had a head's keys their gradients are added."""
        held = sum(part[holder] for part in self.parts)
        shared = not self.cut and any(share.rows is not None for own in self.division for share in own)
        dtype = accumulator(x.dtype) if shared else x.dtype
        out = x.new_zeros(x.shape[0], total, held, x.shape[3], dtype=dtype)
        for owner, pieces in enumerate(received):
            whole, cut = self._split(owner)
            piece = next(pieces).to(dtype)
            for place, share in enumerate(whole):
                out[:, share.head] += piece[:, place]
            for share in cut:
                local = self._rows(share, holder, x)[1]
                out[:, share.head].index_copy_(1, local, next(pieces))
        return out.to(x.dtype)

    def _split(self, owner: int) -> tuple[list[HeadShare], list[HeadShare]]:
        """The shares that have all rows of this tensor, and the others."""
        own = self.division[owner]
        whole = [share for share in own if share.rows is None or not self.cut]
        return whole, [share for share in own if share.rows is not None and self.cut]

    def _rows(self, share: HeadShare, holder: int, x: Tensor) -> tuple[Tensor, Tensor]:
        return _cut_rows(share, self.parts, holder, x.device)
