"""LayerNorm or RMSNorm with modulation in plain PyTorch: what CPUs run, and what the kernels are compared with.

Rows are [N, H]; computed in fp32, or in float64 where the rows are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from arachnec.kernels.rowwise.row_groups import RowGroups


class Vectors(NamedTuple):
    """Weight and bias [H] of the norm; scale, shift and gate [groups, H] of the modulation."""

    weight: Tensor | None
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    gate: Tensor | None


class Gradients(NamedTuple):
    """Gradients of a row operator. Empty where there is none; a vector's is as large as the vector."""

    dx: Tensor
    dbranch: Tensor
    dgate: Tensor
    dscale: Tensor
    dshift: Tensor
    dweight: Tensor
    dbias: Tensor


def empties(x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Tensors of no elements. Separate ones: the results of an operator share no storage."""
    return tuple(x.new_empty(0) for _ in range(count))


def accumulation(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    x: Tensor, branch: Tensor | None, vectors: Vectors, groups: RowGroups, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, y [N, H], and mean and 1/deviation [N] of the rows of h; h is x where there is no branch."""
    dtype = accumulation(x)
    if branch is not None:
        added = branch.to(dtype)
        if vectors.gate is not None:
            added = added * groups.spread(vectors.gate.to(dtype))
        x = (x.to(dtype) + added).to(x.dtype)
    values = x.to(dtype)
    mean = values.mean(1, keepdim=True) if layer else values.new_zeros(values.shape[0], 1)
    values = values - mean
    rstd = (values.square().mean(1, keepdim=True) + eps).rsqrt()
    y = values * rstd
    if vectors.weight is not None:
        y = y * vectors.weight.to(dtype)
    if vectors.bias is not None:
        y = y + vectors.bias.to(dtype)
    if vectors.scale is not None:
        y = y * (1 + groups.spread(vectors.scale.to(dtype)))
    if vectors.shift is not None:
        y = y + groups.spread(vectors.shift.to(dtype))
    return x, y.to(x.dtype), mean[:, 0], rstd[:, 0]


def backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    branch: Tensor | None,
    vectors: Vectors,
    groups: RowGroups,
    layer: bool,
    sums: bool = True,
) -> Gradients:
    """All gradients, given those of y and of h (None: 0); without ``sums`` none of the vectors'.

    The gradient of a shift per row is dy itself, and left to the caller.
    """
    dtype = accumulation(h)
    outer = dy.to(dtype)
    xhat = (h.to(dtype) - mean[:, None]) * rstd[:, None]
    inner, normed, modulated = outer, xhat, outer
    if vectors.weight is not None:
        normed = normed * vectors.weight.to(dtype)
    if vectors.bias is not None:
        normed = normed + vectors.bias.to(dtype)
    if vectors.scale is not None:
        modulated = inner = outer * (1 + groups.spread(vectors.scale.to(dtype)))
    if vectors.weight is not None:
        inner = inner * vectors.weight.to(dtype)
    dx = inner - xhat * (inner * xhat).mean(1, keepdim=True)
    if layer:
        dx = dx - inner.mean(1, keepdim=True)
    dx = dx * rstd[:, None]
    if dh is not None:
        dx = dx + dh.to(dtype)
    gated = branch is not None and vectors.gate is not None
    dbranch = (dx * groups.spread(vectors.gate.to(dtype))).to(branch.dtype) if gated else h.new_empty(0)  # type: ignore[union-attr]
    grads = Gradients(dx.to(h.dtype), dbranch, *empties(h, 5))
    if not sums:
        return grads
    if branch is not None and vectors.gate is not None:
        grads = grads._replace(dgate=groups.sum(dx * branch.to(dtype)).to(vectors.gate.dtype))
    if vectors.scale is not None:
        grads = grads._replace(dscale=groups.sum(outer * normed).to(vectors.scale.dtype))
    if vectors.shift is not None and not groups.per_row:
        grads = grads._replace(dshift=groups.sum(outer).to(vectors.shift.dtype))
    if vectors.weight is not None:
        grads = grads._replace(dweight=(modulated * xhat).sum(0).to(vectors.weight.dtype))
    if vectors.bias is not None:
        grads = grads._replace(dbias=modulated.sum(0).to(vectors.bias.dtype))
    return grads
