"""Norm of queries or keys, per head or across heads, and rotary positions as one operator, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.rowwise import rope_launch, rope_plain
from arachnec.kernels.rowwise.norm_plain import accumulation
from arachnec.kernels.rowwise.rope_plain import Rope
from arachnec.kernels.rowwise.row_groups import dense
from arachnec.kernels.rowwise.row_launch import on_device_of

NORMS = ("layer", "rms")


def norm_rope(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    norm: str = "rms",
    interleaved: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """The norm of x [B, S, heads, D] over D (``weight`` [D]) or over all heads (``weight`` [heads * D]), rotated.

    ``cos`` and ``sin`` [S, D / 2], or [B * S, D / 2] where samples or packed segments have their own, rotate the pairs
    of neighbours (``interleaved``) or of halves of a head; a token with cos 1 and sin 0 is not rotated. With D columns
    each place of a pair has its own: x * cos + (-hi, lo) * sin. They have no gradients.
    The result has x's dtype and order of strides, so heads-first tensors are passed as their transpose.
    Norms without weight and bias are over D. Raises ValueError for other shapes.
    """
    if norm not in NORMS:
        raise ValueError(f"norm is one of {', '.join(NORMS)}, not {norm!r}")
    if x.dim() != 4 or x.shape[3] % 2:
        raise ValueError(f"x is [B, S, heads, D] with even D, not {tuple(x.shape)}")
    _, _, heads, size = x.shape
    vector = weight if weight is not None else bias
    across = vector is not None and heads != 1 and vector.shape[0] == heads * size
    for affine in (weight, bias):
        if affine is not None and tuple(affine.shape) != (heads * size if across else size,):
            raise ValueError(f"weight and bias have {size} or {heads * size} values, not {tuple(affine.shape)}")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together")
    for table in (cos, sin):
        if table is not None and (table.dim() != 2 or table.shape[1] not in (size // 2, size)):
            raise ValueError(f"cos and sin are [S or B * S, {size // 2} or {size}], not {tuple(table.shape)}")
    if cos is not None and sin is not None and cos.shape != sin.shape:
        raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape")
    y: Tensor = torch.ops.arachnec.norm_rope(x, weight, bias, cos, sin, across, norm == "layer", interleaved, eps)[0]
    return y


def _table(x: Tensor, table: Tensor | None) -> Tensor | None:
    if table is not None and table.shape[0] not in (x.shape[1], x.shape[0] * x.shape[1]):
        raise ValueError(f"{table.shape[0]} rows of angles for {x.shape[0]} samples of {x.shape[1]} tokens")
    return table if table is None else table.contiguous()


@torch.library.custom_op("arachnec::norm_rope", mutates_args=())
def _norm_rope(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    across: bool,
    layer: bool,
    interleaved: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean (of no elements for RMSNorm) and 1/deviation [B, S, 1 or heads]."""
    rope = Rope(across, layer, interleaved)
    tables = _table(x, cos), _table(x, sin)
    if x.is_cuda:
        with on_device_of(x):
            y, mean, rstd = rope_launch.forward(dense(x), dense(weight), dense(bias), *tables, rope, eps)
    else:
        y, mean, rstd = rope_plain.forward(x, weight, bias, *tables, rope, eps)
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y), mean if layer else mean.new_empty(0), rstd.contiguous()


@torch.library.custom_op("arachnec::norm_rope_backward", mutates_args=())
def _norm_rope_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    across: bool,
    layer: bool,
    interleaved: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; the last two are empty where there is none, and without ``sums``."""
    rope = Rope(across, layer, interleaved)
    weighted, biased = sums and weight is not None, sums and bias is not None
    if x.is_cuda:
        flat, grad = dense(x), dense(dy)
        tables = _table(x, cos), _table(x, sin)
        with on_device_of(x):
            dx, product, total = rope_launch.backward(
                grad, flat, mean, rstd, dense(weight), *tables, rope, weighted, biased
            )
    else:
        center = mean if layer else torch.zeros_like(rstd)
        dx, product, total = rope_plain.backward(dy, x, center, rstd, weight, cos, sin, rope)
    like = torch.empty_like(x)
    dx = dx if dx.stride() == like.stride() else like.copy_(dx)
    dweight = product.to(weight.dtype) if weighted and weight is not None else x.new_empty(0)
    return dx, dweight, total.to(bias.dtype) if biased and bias is not None else x.new_empty(0)


@_norm_rope.register_fake
def _(x: Tensor, weight: Any, bias: Any, cos: Any, sin: Any, across: bool, layer: bool, *_: Any) -> tuple[Tensor, ...]:
    dtype = accumulation(x)
    units = (x.shape[0], x.shape[1], 1 if across else x.shape[2])
    return torch.empty_like(x), x.new_empty(units if layer else 0, dtype=dtype), x.new_empty(units, dtype=dtype)


@_norm_rope_backward.register_fake
def _(dy: Tensor, x: Tensor, mean: Any, rstd: Any, weight: Any, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    vectors = (x.new_empty(0) if v is None or not rest[-1] else v.new_empty(v.shape) for v in (weight, bias))
    return torch.empty_like(x), *vectors


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, cos, sin, *ctx.how, _ = inputs
    ctx.save_for_backward(x, *output[1:], weight, bias, cos, sin)


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[1:3]
    dx, *vectors = torch.ops.arachnec.norm_rope_backward(dy, *ctx.saved_tensors, *ctx.how, any(wanted))
    returned = (vector if want else None for vector, want in zip(vectors, wanted, strict=True))
    return dx, *returned, None, None, None, None, None, None


_norm_rope.register_autograd(_gradients, setup_context=_save)
