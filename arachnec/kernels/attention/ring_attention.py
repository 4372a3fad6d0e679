"""Ring attention: keys and values pass round the ranks while each attends with its own queries.

Ring Attention (Liu et al., arXiv 2310.01889) with the backward as its own ring: the gradients of a chunk of keys and
values travel behind that chunk and are home after one turn. Each transfer runs while the block before it is computed.
Chunks may differ in length, also 0; every rank knows all lengths.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from arachnec.kernels.attention.attention_block import (
    Block,
    Ranges,
    Sharing,
    Visibility,
    attend,
    attend_backward,
    collect_heads,
    spread_heads,
)
from arachnec.kernels.attention.collectives import accumulator
from arachnec.kernels.attention.sequence_shard import SequenceShard


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: SequenceShard,
    *,
    queries: Ranges,
    keys: tuple[Ranges, ...],
    visibility: Visibility,
    scale: float,
    sharing: Sharing | None,
) -> Tensor:
    """Attention of this rank's queries over the chunks of all ranks of the ring.

    ``query`` [B, H, Lq, D] stands at the global positions ``queries``; ``key`` [B, Hk, Lk, D] and ``value``
    [B, Hk, Lk, Dv] at ``keys[c]`` for this rank's place c in the ring. ``sharing`` says how many query heads use
    each key head, None for one each. Every rank of the ring has equal B, H and Hk. ``shard.attention`` is the kernel
    family to prefer.
    """
    plan = _Plan(shard, queries, keys, visibility, scale, sharing)
    out: Tensor = _Ring.apply(plan, query, key, value)  # type: ignore[no-untyped-call]
    return out


class _Plan:
    """What is not differentiated."""

    def __init__(
        self,
        shard: SequenceShard,
        queries: Ranges,
        keys: tuple[Ranges, ...],
        visibility: Visibility,
        scale: float,
        sharing: Sharing | None,
    ) -> None:
        ranks = [shard.ranks[p] for p in shard.ring_positions]
        self.size = shard.ring
        self.place = shard.index // shard.ulysses
        self.next, self.previous = ranks[(self.place + 1) % self.size], ranks[self.place - 1]
        self.group = shard.ring_group
        self.blocks = tuple(Block(visibility, queries, chunk) for chunk in keys)
        self.scale, self.sharing, self.backend = scale, sharing, shard.attention

    def chunk(self, step: int) -> int:
        """Whose keys are here at this step."""
        return (self.place - step) % self.size

    def length(self, chunk: int) -> int:
        return sum(end - first for first, end in self.blocks[chunk].keys)


class _Packet:
    """Keys and values of one chunk, or their gradients, in one buffer: one message each way."""

    def __init__(self, plan: _Plan, like: tuple[Tensor, Tensor], chunk: int, dtype: torch.dtype) -> None:
        self.shapes = [(*x.shape[:2], plan.length(chunk), x.shape[3]) for x in like]
        sizes = [math.prod(shape) for shape in self.shapes]
        # At least one element, so that every rank takes part in every step whatever the lengths are.
        self.buffer = torch.empty(max(1, sum(sizes)), dtype=dtype, device=like[0].device)
        first, second = self.buffer[: sum(sizes)].split_with_sizes(sizes)
        self.key, self.value = first.view(self.shapes[0]), second.view(self.shapes[1])

    def fill(self, key: Tensor, value: Tensor) -> _Packet:
        self.key.copy_(key)
        self.value.copy_(value)
        return self


class _Transfer:
    """A packet on its way to the next rank while another comes from the previous one."""

    def __init__(self, plan: _Plan, outgoing: _Packet, incoming: _Packet) -> None:
        self.outgoing, self.incoming = outgoing, incoming  # alive until both have arrived
        operations = [
            dist.P2POp(dist.isend, outgoing.buffer, plan.next, plan.group),
            dist.P2POp(dist.irecv, incoming.buffer, plan.previous, plan.group),
        ]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> _Packet:
        for work in self.works:
            work.wait()
        return self.incoming


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = _forward(plan, query, key, value)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_backward(ctx.plan, grad.contiguous(), *ctx.saved_tensors)


def _forward(plan: _Plan, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    like = (key, value)
    if query.shape[1] == 0:  # the same on every rank of a ring
        lse = query.new_zeros(query.shape[:3], dtype=accumulator(query.dtype))
        return query.new_zeros(*query.shape[:3], value.shape[3]), lse
    held = _Packet(plan, like, plan.place, key.dtype).fill(key, value)
    merged: tuple[Tensor, Tensor] | None = None
    for step in range(plan.size):
        chunk = plan.chunk(step)
        last = step == plan.size - 1
        transfer = None if last else _Transfer(plan, held, _Packet(plan, like, plan.chunk(step + 1), key.dtype))
        block = plan.blocks[chunk]
        keys, values = spread_heads(held.key, plan.sharing), spread_heads(held.value, plan.sharing)
        out, lse = attend(query, keys, values, block, plan.scale, plan.backend)
        merged = (out.to(lse.dtype), lse) if merged is None else merge(*merged, out, lse)
        if transfer is not None:
            held = transfer.wait()
    assert merged is not None
    out, lse = merged
    return out.to(query.dtype), lse.masked_fill(lse == -math.inf, 0.0)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys from the attention over each (online softmax)."""
    top = torch.maximum(lse, other_lse)
    top = top.masked_fill(top == -math.inf, 0.0)
    left, right = (lse - top).exp(), (other_lse - top).exp()
    total = left + right
    safe = total.masked_fill(total == 0, 1.0)
    out = out * (left / safe)[..., None] + other * (right / safe)[..., None]
    return out, top + total.log()


def _backward(
    plan: _Plan, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    like = (key, value)
    if query.shape[1] == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    dtype = accumulator(query.dtype)
    grad_query = torch.zeros_like(query, dtype=dtype)
    held = _Packet(plan, like, plan.place, key.dtype).fill(key, value)
    returning: _Transfer | None = None
    for step in range(plan.size):
        chunk = plan.chunk(step)
        last = step == plan.size - 1
        transfer = None if last else _Transfer(plan, held, _Packet(plan, like, plan.chunk(step + 1), key.dtype))
        keys, values = spread_heads(held.key, plan.sharing), spread_heads(held.value, plan.sharing)
        shares = attend_backward(grad, query, keys, values, out, lse, plan.blocks[chunk], plan.scale, plan.backend)
        total = _Packet(plan, like, chunk, dtype)
        total.buffer.zero_()
        if shares is not None:
            grad_query += shares[0]
            total.fill(collect_heads(shares[1], plan.sharing), collect_heads(shares[2], plan.sharing))
        if returning is not None:
            total.buffer += returning.wait().buffer
        returning = _Transfer(plan, total, _Packet(plan, like, plan.chunk(step + 1), dtype))
        if transfer is not None:
            held = transfer.wait()
    assert returning is not None
    mine = returning.wait()
    return grad_query.to(query.dtype), mine.key.to(key.dtype), mine.value.to(value.dtype)
