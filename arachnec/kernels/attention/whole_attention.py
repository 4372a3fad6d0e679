"""Attention over keys that are all here, by the kernels that a ring uses for its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from arachnec.kernels.attention.attention_block import (
    Block,
    Sharing,
    Visibility,
    attend,
    attend_backward,
    collect_heads,
    spread_heads,
)


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sharing: Sharing | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of ``query`` [B, H, Lq, D] over ``key`` [B, Hk, Lk, D] and ``value`` [B, Hk, Lk, Dv].

    ``sharing`` says how many query heads use each key head, None for one each; ``backend`` is the kernel family to
    prefer. Returns [B, H, Lq, Dv]; a query that sees nothing gives 0.
    """
    rows, columns = (((0, x.shape[2]),) if x.shape[2] else () for x in (query, key))
    call = _Call(Block(visibility, rows, columns), scale, sharing, backend)
    out: Tensor = _Whole.apply(call, query, key, value)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Call:
    """What is not differentiated."""

    block: Block
    scale: float
    sharing: Sharing | None
    backend: str | None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = spread_heads(key, call.sharing), spread_heads(value, call.sharing)
        out, lse = attend(query, keys, values, call.block, call.scale, call.backend)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse.masked_fill_(lse == -math.inf, 0.0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = spread_heads(key, call.sharing), spread_heads(value, call.sharing)
        shares = attend_backward(grad.contiguous(), query, keys, values, out, lse, call.block, call.scale, call.backend)
        if shares is None:
            return None, torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        of_query, of_key, of_value = shares
        of_key, of_value = collect_heads(of_key, call.sharing), collect_heads(of_value, call.sharing)
        return None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)
