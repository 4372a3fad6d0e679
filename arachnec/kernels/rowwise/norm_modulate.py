"""Norm, modulation, gate and residual as one operator that torch.compile and torch.export can trace.

y = norm(h) * (1 + scale) + shift with LayerNorm or RMSNorm, where h is x, or residual + gate * branch. This is the
adaptive layer norm of DiT (arXiv 2212.09748), fused over packed clips as in AdaptiveLoad (arXiv 2605.17923). Triton
kernels on CUDA, plain PyTorch elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.rowwise import norm_launch, norm_plain
from arachnec.kernels.rowwise.norm_plain import Vectors
from arachnec.kernels.rowwise.row_groups import dense, group_vectors, row_groups, rows_of
from arachnec.kernels.rowwise.row_launch import on_device_of

NORMS = ("layer", "rms")


def norm_modulate(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    norm: str = "layer",
    eps: float = 1e-6,
) -> Tensor:
    """(norm(x) * weight + bias) * (1 + scale) + shift over the last dimension of x [..., H], in x's dtype.

    ``scale`` and ``shift`` are [H], per sample [B, H] or [B, 1, H], per token [B, S, H], or, with ``cu_seqlens``
    [G + 1] (int32 or int64, from 0 to the number of rows), per segment [G, H]. Any of the vectors may be absent, and of
    any dtype. Raises ValueError for other shapes. Its gradients have no gradients.
    """
    (scale, shift), per_row = group_vectors(x, (scale, shift), cu_seqlens)
    _check(norm, x, weight, bias)
    vectors = None, weight, bias, scale, shift, cu_seqlens, per_row
    y: Tensor = torch.ops.arachnec.norm_modulate(None, x, *vectors, norm == "layer", eps)[1]
    return y


def gate_residual_norm_modulate(
    branch: Tensor,
    residual: Tensor,
    gate: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    norm: str = "layer",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """h = residual + gate * branch, rounded to the residual's dtype, and ``norm_modulate`` of h: (h, y).

    ``branch`` and ``residual`` are [..., H]; ``gate``, ``scale`` and ``shift`` as in ``norm_modulate``.
    """
    if branch.shape != residual.shape:
        raise ValueError(f"branch {tuple(branch.shape)} and residual {tuple(residual.shape)} differ in shape")
    (gate, scale, shift), per_row = group_vectors(residual, (gate, scale, shift), cu_seqlens)
    _check(norm, residual, weight, bias)
    vectors = gate, weight, bias, scale, shift, cu_seqlens, per_row
    h, y, _, _ = torch.ops.arachnec.norm_modulate(branch, residual, *vectors, norm == "layer", eps)
    return h, y


def _check(norm: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm is one of {', '.join(NORMS)}, not {norm!r}")
    for vector in (weight, bias):
        if vector is not None and tuple(vector.shape) != (x.shape[-1],):
            raise ValueError(f"weight and bias have shape ({x.shape[-1]},), not {tuple(vector.shape)}")


def vectors_of(
    weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, gate: Tensor | None
) -> Vectors:
    """The vectors as the kernels read them: dense along the row."""
    return Vectors(dense(weight), dense(bias), dense(scale), dense(shift), dense(gate))


@torch.library.custom_op("arachnec::norm_modulate", mutates_args=())
def _norm_modulate(
    branch: Tensor | None,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    cu_seqlens: Tensor | None,
    per_row: bool,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, y, and in fp32 the mean and 1/deviation of each row of h.

    With a branch x is the residual. Without one h is x: no elements are returned for it. RMSNorm has no mean.
    """
    rows, side = rows_of(x), None if branch is None else rows_of(branch)
    groups = row_groups(rows.shape[0], (gate, scale, shift), cu_seqlens, per_row)
    run = norm_launch.forward if x.is_cuda else norm_plain.forward
    with on_device_of(x):
        h, y, mean, rstd = run(rows, side, vectors_of(weight, bias, scale, shift, gate), groups, layer, eps)
    lead = x.shape[:-1]
    h = x.new_empty(0) if branch is None else h.view(x.shape)
    return h, y.view(x.shape), mean.view(lead) if layer else mean[:0], rstd.view(lead)


@torch.library.custom_op("arachnec::norm_modulate_backward", mutates_args=())
def _norm_modulate_backward(
    dh: Tensor | None,
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    cu_seqlens: Tensor | None,
    per_row: bool,
    layer: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dbranch, dgate, dscale, dshift, dweight, dbias; empty where there is none.

    Without a gate dbranch is dx and empty here. Without ``sums`` the vectors' gradients are empty.
    """
    rows, outer = rows_of(h), rows_of(dy)
    above = None if dh is None else rows_of(dh)
    side = None if branch is None else rows_of(branch)
    groups = row_groups(rows.shape[0], (gate, scale, shift), cu_seqlens, per_row)
    vectors = vectors_of(weight, bias, scale, shift, gate)
    mean, rstd = mean.reshape(-1), rstd.reshape(-1)
    if h.is_cuda:
        with on_device_of(h):
            grads = norm_launch.backward(outer, above, rows, mean, rstd, side, vectors, groups, layer, sums)
    else:
        center = mean if layer else torch.zeros_like(rstd)
        grads = norm_plain.backward(outer, above, rows, center, rstd, side, vectors, groups, layer, sums)
    gated = branch is not None and gate is not None
    return grads._replace(dx=grads.dx.view(h.shape), dbranch=grads.dbranch.view(h.shape) if gated else grads.dbranch)


@_norm_modulate.register_fake
def _(branch: Tensor | None, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layer, dtype = rest[-2], norm_plain.accumulation(x)
    mean, rstd = x.new_empty(x.shape[:-1] if layer else 0, dtype=dtype), x.new_empty(x.shape[:-1], dtype=dtype)
    return x.new_empty(0 if branch is None else x.shape), x.new_empty(x.shape), mean, rstd


@_norm_modulate_backward.register_fake
def _(dh: Any, dy: Any, h: Tensor, mean: Any, rstd: Any, *rest: Any) -> tuple[Tensor, ...]:
    branch, gate, weight, bias, scale, shift, _, per_row, _, sums = rest
    dbranch = h.new_empty(0) if branch is None or gate is None else branch.new_empty(branch.shape)
    vectors = (gate, scale, None if per_row else shift, weight, bias)
    grads = (h.new_empty(0) if vector is None or not sums else vector.new_empty(vector.shape) for vector in vectors)
    return h.new_empty(h.shape), dbranch, *grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    branch, x, gate, weight, bias, scale, shift, cu_seqlens, ctx.per_row, ctx.layer, _ = inputs
    h, _, mean, rstd = output
    ctx.save_for_backward(x if branch is None else h, mean, rstd, branch, gate, weight, bias, scale, shift, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpointed forward gives them once
    h, branch, gate, shift = saved[0], saved[3], saved[4], saved[8]
    wanted = ctx.needs_input_grad[2:7]
    dh = None if branch is None else dh
    dy = torch.zeros_like(h) if dy is None else dy
    dx, dbranch, dgate, dscale, dshift, dweight, dbias = torch.ops.arachnec.norm_modulate_backward(
        dh, dy, *saved, ctx.per_row, ctx.layer, any(wanted)
    )
    if branch is None:
        dbranch = None
    elif gate is None:
        dbranch = dx.to(branch.dtype)
    if ctx.per_row and shift is not None:
        dshift = rows_of(dy).to(shift.dtype)
    vectors = (dgate, dweight, dbias, dscale, dshift)
    returned = (vector if want else None for vector, want in zip(vectors, wanted, strict=True))
    return dbranch, dx, *returned, None, None, None, None


_norm_modulate.register_autograd(_gradients, setup_context=_save)
