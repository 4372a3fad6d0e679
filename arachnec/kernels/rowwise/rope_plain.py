"""Norm of queries or keys and rotary positions in plain PyTorch: what CPUs run, and what the kernels are compared with.

Rotary positions are those of RoFormer (arXiv 2104.09864).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from arachnec.kernels.rowwise.norm_plain import accumulation


class Rope(NamedTuple):
    """Norm over each head or across all heads, LayerNorm or RMSNorm; pairs of neighbours or of halves."""

    across: bool
    layer: bool
    interleaved: bool


def _split(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def _angles(table: Tensor, x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Of both places of a pair: the same where the table has D / 2 columns, each its own where it has D."""
    samples = max(table.shape[0] // max(x.shape[1], 1), 1)
    rows = table.to(x.dtype).reshape(samples, x.shape[1], 1, table.shape[1])
    return _split(rows, interleaved) if table.shape[1] == x.shape[3] else (rows, rows)


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool, *, transposed: bool = False) -> Tensor:
    """x [B, S, heads, D] with each pair rotated by its token's angle; cos and sin [S or B * S, D / 2 or D].

    ``transposed``: by the transpose of that matrix, for gradients.
    """
    if cos is None or sin is None:
        return x
    cos_lo, cos_hi = _angles(cos, x, interleaved)
    sin_lo, sin_hi = _angles(sin, x, interleaved)
    if transposed:
        sin_lo, sin_hi = -sin_hi, -sin_lo
    lo, hi = _split(x, interleaved)
    rotated = (lo * cos_lo - hi * sin_lo, hi * cos_hi + lo * sin_hi)
    return torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)


def _units(x: Tensor, rope: Rope) -> Tensor:
    """Rows that one norm is over: [B, S, 1, heads * D] or [B, S, heads, D]."""
    return x.flatten(2)[:, :, None] if rope.across else x


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rope: Rope,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x, and mean and 1/deviation [B, S, 1 or heads]."""
    dtype = accumulation(x)
    values = _units(x.to(dtype), rope)
    mean = values.mean(-1, keepdim=True) if rope.layer else values.new_zeros(*values.shape[:-1], 1)
    values = values - mean
    rstd = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    values = values * rstd
    if weight is not None:
        values = values * weight.to(dtype)
    if bias is not None:
        values = values + bias.to(dtype)
    y = rotate(values.reshape(x.shape), cos, sin, rope.interleaved)
    return y.to(x.dtype), mean[..., 0], rstd[..., 0]


def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rope: Rope,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the gradients of weight and bias in the precision of the sums."""
    dtype = accumulation(x)
    outer = _units(rotate(dy.to(dtype), cos, sin, rope.interleaved, transposed=True), rope)
    xhat = (_units(x.to(dtype), rope) - mean[..., None]) * rstd[..., None]
    inner = outer if weight is None else outer * weight.to(dtype)
    dx = inner - xhat * (inner * xhat).mean(-1, keepdim=True)
    if rope.layer:
        dx = dx - inner.mean(-1, keepdim=True)
    dx = (dx * rstd[..., None]).reshape(x.shape)
    return dx.to(x.dtype), (outer * xhat).sum((0, 1, 2)), outer.sum((0, 1, 2))
