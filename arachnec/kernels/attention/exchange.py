"""Moving tokens and heads between the ranks of a cascade, or anew along a dimension, with each move's gradients.

Every move is a collective of ragged pieces (``arachnec.kernels.attention.collectives``), and so is its gradient.

Gradients are *partial*: every rank weighs its loss by 1/degree, and the gradient of what is replicated is summed over
the ranks once, at the end. Hence a slice of a replicated tensor has a zero-padded gradient and no communication, and
a gather's gradient is summed over the ranks and sliced.

Factorised attention needs all places of a frame, then all frames of a place. One all-to-all lies in between, as in
DSP (arXiv 2403.10266, section 3), for any split of a dimension into factors and for uneven shares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from arachnec.kernels.attention.collectives import accumulator, all_gather, exchange, reduce_scatter
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split


def shard_tokens(x: Tensor, dim: int, shard: SequenceShard) -> Tensor:
    """This rank's tokens of a replicated ``x`` that holds all S of them along ``dim``.

    The gradient of ``x`` is zero outside this rank's tokens.
    """
    if x.shape[dim] != shard.total:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not hold the {shard.total} tokens of the sequence")
    return x.narrow(dim, shard.offset, shard.local)


def gather_tokens(x: Tensor, dim: int, shard: SequenceShard) -> Tensor:
    """All S tokens along ``dim``, on every rank, from the tokens of each.

    The gradient of ``x`` is this rank's slice of the sum of all ranks' gradients.
    """
    if x.shape[dim] != shard.local:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not hold this rank's {shard.local} tokens")
    return gather_pieces(x, dim, shard.tokens, shard)


def gather_pieces(x: Tensor, dim: int, sizes: tuple[int, ...], shard: SequenceShard) -> Tensor:
    """``gather_tokens`` of something else than the sequence: ``sizes`` along ``dim`` by position."""
    if shard.degree == 1:
        return x
    gathered: Tensor = _Gather.apply(x, dim % x.ndim, sizes, shard)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], shard: SequenceShard) -> Tensor:
        ctx.dim, ctx.sizes, ctx.shard = dim, sizes, shard
        return all_gather(x, dim, sizes, shard.ranks, shard.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shard: SequenceShard = ctx.shard
        return reduce_scatter(grad, ctx.dim, ctx.sizes, shard.index, shard.ranks, shard.group), None, None, None


def tokens_to_heads(
    tensors: Sequence[Tensor],
    heads: Sequence[tuple[tuple[int, int], ...]],
    parts: Sequence[tuple[tuple[int, ...], ...]],
    shard: SequenceShard,
) -> tuple[Tensor, ...]:
    """The Ulysses all-to-all (arXiv 2309.14509, section 3.1) of several tensors in one message per peer.

    ``tensors[i]`` is [B, H_i, L_i, D_i] with this rank's tokens of all heads; ``heads[i][j]`` is the range of heads
    that the Ulysses peer j needs (ranges may overlap or be empty), ``parts[i][p][j]`` how many tokens of part p peer j
    holds; L_i is the sum over p. Returned are all peers' tokens of this rank's heads, part by part, each by peer.
    """
    me = shard.index % shard.ulysses
    plan = _HeadPlan(tuple(heads), tuple(parts), me, shard)
    return moved_to_heads(plan, tensors)


def heads_to_tokens(
    x: Tensor, heads: int, ranges: tuple[tuple[int, int], ...], parts: tuple[tuple[int, ...], ...], shard: SequenceShard
) -> Tensor:
    """The way back of ``tokens_to_heads`` for ranges that cover all ``heads`` without overlap."""
    plan = _HeadPlan((ranges,), (parts,), shard.index % shard.ulysses, shard)
    return moved_to_tokens(plan, x, heads)


class HeadPlan(Protocol):
    """Moves tensors between tokens of all heads and all tokens of some heads."""

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]: ...


def moved_to_heads(plan: HeadPlan, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """All tokens of this rank's heads, of each tensor of this rank's tokens of all heads."""
    moved: tuple[Tensor, ...] = _TokensToHeads.apply(plan, *tensors)  # type: ignore[no-untyped-call]
    return moved


def moved_to_tokens(plan: HeadPlan, x: Tensor, heads: int) -> Tensor:
    """The way back, of one tensor."""
    moved: Tensor = _HeadsToTokens.apply(plan, heads, x)  # type: ignore[no-untyped-call]
    return moved


class _HeadPlan:
    """Who needs which heads and holds which tokens, for every tensor of one all-to-all."""

    def __init__(
        self,
        heads: tuple[tuple[tuple[int, int], ...], ...],
        parts: tuple[tuple[tuple[int, ...], ...], ...],
        me: int,
        shard: SequenceShard,
    ) -> None:
        self.heads, self.parts, self.me = heads, parts, me
        self.ranks = tuple(shard.ranks[p] for p in shard.ulysses_positions)
        self.group = shard.ulysses_group

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        peers = range(len(self.ranks))
        send = [[x[:, slice(*h[j])] for x, h in zip(tensors, self.heads, strict=True)] for j in peers]
        shapes = [
            [
                (x.shape[0], h[self.me][1] - h[self.me][0], sum(part[j] for part in parts), x.shape[3])
                for x, h, parts in zip(tensors, self.heads, self.parts, strict=True)
            ]
            for j in peers
        ]
        received = exchange(send, shapes, self.ranks, self.group)
        return [_by_part([r[i] for r in received], parts) for i, parts in enumerate(self.parts)]

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        peers = range(len(self.ranks))
        split = [_by_peer(x, parts) for x, parts in zip(tensors, self.parts, strict=True)]
        send = [[pieces[j] for pieces in split] for j in peers]
        shapes = [
            [
                (x.shape[0], h[j][1] - h[j][0], sum(part[self.me] for part in parts), x.shape[3])
                for x, h, parts in zip(tensors, self.heads, self.parts, strict=True)
            ]
            for j in peers
        ]
        received = exchange(send, shapes, self.ranks, self.group)
        return [
            _join_heads([r[i] for r in received], ranges, total)
            for i, (ranges, total) in enumerate(zip(self.heads, heads, strict=True))
        ]


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: HeadPlan, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.heads = plan, [x.shape[1] for x in tensors]
        return tuple(plan.to_heads(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.plan.to_tokens(grads, ctx.heads)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: HeadPlan, heads: int, x: Tensor) -> Tensor:
        ctx.plan = plan
        return plan.to_tokens([x], [heads])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.plan.to_heads([grad])


def even_ranges(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """``even_split`` as ranges [first, end)."""
    ends = [0]
    for size in even_split(total, parts):
        ends.append(ends[-1] + size)
    return tuple(pairwise(ends))


def _by_part(received: list[Tensor], parts: tuple[tuple[int, ...], ...]) -> Tensor:
    """Peer-major pieces, each with its parts in order, joined part-major along the tokens."""
    split = [piece.split_with_sizes([part[j] for part in parts], 2) for j, piece in enumerate(received)]
    return torch.cat([pieces[p] for p in range(len(parts)) for pieces in split], 2)


def _by_peer(x: Tensor, parts: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """The inverse of ``_by_part``."""
    peers = len(parts[0])
    pieces = x.split_with_sizes([size for part in parts for size in part], 2)
    return [torch.cat(pieces[j::peers], 2) for j in range(peers)]


def _join_heads(received: list[Tensor], ranges: tuple[tuple[int, int], ...], heads: int) -> Tensor:
    """Pieces of heads put side by side; where ranges overlap (a key head that two peers used) they are added."""
    if ranges[0][0] == 0 and ranges[-1][1] == heads and all(a[1] == b[0] for a, b in pairwise(ranges)):
        return torch.cat(received, 1)
    first = received[0]
    joined = first.new_zeros(first.shape[0], heads, *first.shape[2:], dtype=accumulator(first.dtype))
    for piece, (begin, end) in zip(received, ranges, strict=True):
        joined[:, begin:end] += piece
    return joined.to(first.dtype)


@dataclass(frozen=True)
class Dealt:
    """A dimension of ``outer x sum(shares) x inner`` positions; the rank at position i of the group holds, for every
    outer and inner index, the i-th of the consecutive ranges ``shares`` of the factor between them."""

    outer: int
    shares: tuple[int, ...]
    inner: int

    @property
    def size(self) -> int:
        return self.outer * sum(self.shares) * self.inner

    def local(self, index: int) -> int:
        return self.outer * self.shares[index] * self.inner

    def held(self, index: int) -> Tensor:
        """bool [size]: the positions of one rank, which it keeps in ascending order."""
        ranks = torch.arange(len(self.shares)).repeat_interleave(torch.tensor(self.shares))
        return (ranks == index).repeat_interleave(self.inner).repeat(self.outer)


@dataclass(frozen=True)
class _Moves:
    """Per peer, which of a rank's own positions it sends, and where what it gets belongs."""

    send: tuple[Tensor, ...]
    receive: tuple[Tensor, ...]


@functools.lru_cache(maxsize=256)
def _moves(before: Dealt, after: Dealt, index: int, device: torch.device) -> _Moves:
    """On the ``device``, once: a copy at every use would make the host wait for it."""
    mine, wanted = before.held(index), after.held(index)
    peers = range(len(before.shares))
    send = tuple(after.held(j)[mine].nonzero().flatten().to(device) for j in peers)
    receive = tuple(before.held(j)[wanted].nonzero().flatten().to(device) for j in peers)
    return _Moves(send, receive)


def redistribute(x: Tensor, dim: int, before: Dealt, after: Dealt, shard: SequenceShard) -> Tensor:
    """``x`` with this rank's positions of ``after`` along ``dim``, from those of ``before``. Collective over the
    ranks of the shard, but where nothing moves.

    Its gradient is dealt out as ``before`` again. Raises ValueError where the sizes differ.
    """
    if before.size != after.size or x.shape[dim] != before.local(shard.index):
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} does not go from {before} to {after}")
    if shard.degree == 1 or _same(before, after):
        return x
    moved: Tensor = _Redistribute.apply(x, dim % x.ndim, before, after, shard)  # type: ignore[no-untyped-call]
    return moved


@functools.lru_cache(maxsize=256)
def _same(before: Dealt, after: Dealt) -> bool:
    return all(torch.equal(before.held(i), after.held(i)) for i in range(len(before.shares)))


def _moved(x: Tensor, dim: int, before: Dealt, after: Dealt, shard: SequenceShard) -> Tensor:
    moves = _moves(before, after, shard.index, x.device)
    send = [[x.index_select(dim, positions)] for positions in moves.send]
    shapes = [[(*x.shape[:dim], len(positions), *x.shape[dim + 1 :])] for positions in moves.receive]
    received = exchange(send, shapes, shard.ranks, shard.group)
    result = x.new_empty(*x.shape[:dim], after.local(shard.index), *x.shape[dim + 1 :])
    for positions, (piece,) in zip(moves.receive, received, strict=True):
        result.index_copy_(dim, positions, piece)
    return result


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, before: Dealt, after: Dealt, shard: SequenceShard) -> Tensor:
        ctx.move = dim, after, before, shard
        return _moved(x, dim, before, after, shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, after, before, shard = ctx.move
        return _moved(grad, dim, after, before, shard), None, None, None, None
