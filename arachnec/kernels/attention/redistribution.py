"""Tokens dealt out anew along one dimension: over frames, over places, over both as one sequence.

Factorised attention needs all places of a frame, then all frames of a place. One all-to-all lies in between, as in
DSP (arXiv 2403.10266, section 3), for any split of a dimension into factors and for uneven shares.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from arachnec.kernels.attention.collectives import exchange
from arachnec.kernels.attention.sequence_shard import SequenceShard


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
