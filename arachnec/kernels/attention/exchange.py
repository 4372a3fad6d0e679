"""Moving tokens and heads between the ranks of a cascade, with the gradients of each move.

Every move is a collective of ragged pieces (``arachnec.kernels.attention.collectives``), and so is its gradient.

Gradients are *partial*: every rank weighs its loss by 1/degree, and the gradient of what is replicated is summed over
the ranks once, at the end. Hence a slice of a replicated tensor has a zero-padded gradient and no communication, and
a gather's gradient is summed over the ranks and sliced.
"""

from __future__ import annotations

from collections.abc import Sequence
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
