"""One block of attention: some queries against some keys, with the log-sum-exp that lets blocks be merged.

Forward and backward call torch's own fused kernels where they return the log-sum-exp, and otherwise plain matrix
products over tiles of rows, so that memory stays linear in the sequence. Queries and keys carry their global
positions as ranges, from which the block's part of a mask or of the causal triangle is made, a tile of rows at a time.

A group of query heads is summed in 32 bits at least and in one fixed way: no atomics, and no rounding between terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arachnec.kernels.attention.attention_backend import MATH
from arachnec.kernels.attention.collectives import accumulator
from arachnec.kernels.attention.fused_attention import backend_for, fused_backward, fused_forward

Ranges = tuple[tuple[int, int], ...]  # global positions [first, end) of consecutive local tokens, ascending

TILE = 1 << 24  # scores or mask values that exist at one time


@dataclass(frozen=True)
class Visibility:
    """The keys that a query may attend to: by a global mask, the causal triangle, or (neither) all."""

    mask: Tensor | None  # [B or 1, H or 1, all queries or 1, all keys], boolean or additive
    is_causal: bool


@dataclass(frozen=True)
class Block:
    """The block of all scores with these positions."""

    visibility: Visibility
    queries: Ranges
    keys: Ranges

    @property
    def empty(self) -> bool:
        """No query sees any key."""
        if not self.queries or not self.keys:
            return True
        return self.visibility.is_causal and self.keys[0][0] >= self.queries[-1][1]

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        if self.visibility.is_causal:
            return self.keys[-1][1] - 1 <= self.queries[0][0]
        return self.visibility.mask is None

    @property
    def triangle(self) -> bool:
        """Exactly the causal triangle; positions ascend, so equal ranges suffice."""
        return self.visibility.is_causal and self.queries == self.keys

    def bias(self, rows: slice, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What is added to the scores of these rows, [B or 1, H or 1, rows or 1, keys]; None for nothing."""
        if self.full:
            return None
        if self.visibility.is_causal:
            row, column = positions(self.queries, device)[rows], positions(self.keys, device)
            return additive((row[:, None] >= column)[None, None], dtype)
        mask = self.visibility.mask
        assert mask is not None
        if mask.shape[-2] > 1:
            mask = select(mask, -2, within(self.queries, rows))
        return additive(select(mask, -1, self.keys), dtype)


@dataclass(frozen=True)
class Heads:
    """What a kernel reads: query [B, H, Lq, D], key [B, H, Lk, D], value [B, H, Lk, Dv], and a mask, boolean or added
    to the scores, [B or 1, H or 1, Lq or 1, Lk]."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    scale: float


@dataclass(frozen=True)
class Attended:
    """The output's gradient, the output and the log-sum-exp, merged over all keys."""

    grad: Tensor
    out: Tensor
    lse: Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and natural-log sum of exponentials [B, H, Lq] of one block.

    Rows that see nothing give 0 and -inf. The log-sum-exp is in 32 bits at least. ``backend`` is the kernel family to
    prefer where it can compute this block.
    """
    if block.empty or query.numel() == 0:
        shape = query.shape[:3]
        lse = query.new_full(shape, -math.inf, dtype=accumulator(query.dtype))
        return query.new_zeros(*shape, value.shape[3]), lse
    kernel, fused = _kernel(query, value, block, backend)
    if fused and (block.full or block.triangle):
        return fused_forward(kernel, query, key, value, None, block.triangle, scale)
    outs, lses = [], []
    for rows in _tiles(query, key, block, fused):
        bias = block.bias(rows, query.dtype if fused else accumulator(query.dtype), query.device)
        out, lse = biased_forward(kernel, Heads(query[:, :, rows], key, value, bias, scale))
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """This block's share of the gradients of query, key and value, from the *merged* output and log-sum-exp.

    ``lse`` is finite: 0 stands for rows that see nothing in any block. None where the block has no part in it.
    """
    if block.empty or query.numel() == 0:
        return None
    kernel, fused = _kernel(query, value, block, backend)
    if fused and (block.full or block.triangle):
        return fused_backward(kernel, grad, query, key, value, out, lse, None, block.triangle, scale)
    dtype = accumulator(query.dtype)
    grad_query = []
    grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    for rows in _tiles(query, key, block, fused):
        bias = block.bias(rows, query.dtype if fused else dtype, query.device)
        attended = Attended(grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
        dq, dk, dv = biased_backward(kernel, Heads(query[:, :, rows], key, value, bias, scale), attended)
        grad_query.append(dq)
        grad_key += dk
        grad_value += dv
    return torch.cat(grad_query, 2), grad_key, grad_value


def _kernel(query: Tensor, value: Tensor, block: Block, backend: str | None) -> tuple[str, bool]:
    """The kernel family that computes this block, and whether it is a fused one."""
    kernel = backend_for(query, value, masked=not (block.full or block.triangle), preferred=backend)
    return kernel, kernel != MATH


def _tiles(query: Tensor, key: Tensor, block: Block, fused: bool) -> Iterator[slice]:
    """Rows at a time, so that at most about ``TILE`` values of scores or bias exist."""
    rows, columns = query.shape[2], key.shape[2]
    mask = block.visibility.mask
    wide = query.shape[0] * query.shape[1]
    if fused:
        wide = 1 if mask is None else mask.shape[0] * mask.shape[1]
    step = max(1, TILE // max(1, wide * columns))
    if fused and mask is not None and mask.shape[-2] == 1:
        step = rows
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def biased_forward(kernel: str, heads: Heads) -> tuple[Tensor, Tensor]:
    """``attend`` by this kernel family: every query to every key."""
    heads = _with_bias_of(kernel, heads)
    if kernel == MATH:
        out, lse = plain_forward(heads)
    else:
        out, lse = fused_forward(kernel, heads.query, heads.key, heads.value, heads.bias, False, heads.scale)
    if heads.bias is not None:
        dead = (heads.bias == -math.inf).all(-1)
        out, lse = out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -math.inf)
    return out, lse


def biased_backward(kernel: str, heads: Heads, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` of ``biased_forward``."""
    heads = _with_bias_of(kernel, heads)
    if kernel == MATH:
        return plain_backward(heads, attended)
    read = (heads.query, heads.key, heads.value, attended.out, attended.lse, heads.bias)
    return fused_backward(kernel, attended.grad, *read, False, heads.scale)


def _with_bias_of(kernel: str, heads: Heads) -> Heads:
    """With the bias in the form that a kernel family adds."""
    dtype = accumulator(heads.query.dtype) if kernel == MATH else heads.query.dtype
    return heads if heads.bias is None else replace(heads, bias=additive(heads.bias, dtype))


def plain_forward(heads: Heads) -> tuple[Tensor, Tensor]:
    scores = _scores(heads)
    lse = scores.logsumexp(-1)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    weights = scores.sub_(shift[..., None]).exp_()
    return (weights @ heads.value.to(weights.dtype)).to(heads.query.dtype), lse


def plain_backward(heads: Heads, attended: Attended) -> tuple[Tensor, Tensor, Tensor]:
    weights = _scores(heads).sub_(attended.lse[..., None]).exp_()
    dtype = weights.dtype
    grad = attended.grad.to(dtype)
    grad_value = weights.mT @ grad
    delta = (grad * attended.out).sum(-1, keepdim=True)
    grad_scores = (grad @ heads.value.to(dtype).mT).sub_(delta).mul_(weights).mul_(heads.scale)
    return grad_scores @ heads.key.to(dtype), grad_scores.mT @ heads.query.to(dtype), grad_value


def _scores(heads: Heads) -> Tensor:
    dtype = accumulator(heads.query.dtype)
    scores = (heads.query.to(dtype) @ heads.key.to(dtype).mT).mul_(heads.scale)
    return scores if heads.bias is None else scores.add_(heads.bias)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def positions(ranges: Ranges, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(first, end, device=device) for first, end in ranges])


def select(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """These ranges of ``x`` along ``dim``; a view where there is one."""
    pieces = [x.narrow(dim, first, end - first) for first, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def within(ranges: Ranges, rows: slice) -> Ranges:
    """The positions of a slice of the local tokens."""
    selected = []
    start = 0
    for first, end in ranges:
        lo, hi = max(rows.start - start, 0), min(rows.stop - start, end - first)
        if lo < hi:
            selected.append((first + lo, first + hi))
        start += end - first
    return tuple(selected)


Sharing = tuple[int, ...]  # how many consecutive query heads use each key head


def spread_heads(x: Tensor, sharing: Sharing | None) -> Tensor:
    """[B, Hk, L, D] as [B, H, L, D]: each key head once for every query head that uses it."""
    if sharing is None:
        return x
    if not sharing:  # a rank without heads
        return x[:, :0]
    return torch.cat([x[:, i : i + 1].expand(-1, count, -1, -1) for i, count in enumerate(sharing)], 1)


def collect_heads(grad: Tensor, sharing: Sharing | None) -> Tensor:
    """The gradient of ``spread_heads``, [B, H, L, D] to [B, Hk, L, D]; where heads are shared, in the accumulator."""
    if sharing is None:
        return grad
    if not sharing:
        return grad[:, :0].to(accumulator(grad.dtype))
    groups = grad.split_with_sizes(sharing, 1)
    return torch.cat([group.sum(1, keepdim=True, dtype=accumulator(grad.dtype)) for group in groups], 1)
