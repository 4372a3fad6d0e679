"""Norm, modulation, gate and residual as operators that torch.compile and torch.export see through.

y = norm(h) * (1 + scale) + shift with LayerNorm or RMSNorm, after h = residual + gate * branch or not. The adaptive
layer norm of DiT (arXiv 2212.09748); fused over packed clips as AdaptiveLoad does (2605.17923). On CUDA
the Triton kernels, elsewhere plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.rowwise import norm_launch, norm_plain
from arachnec.kernels.rowwise.norm_plain import Gradients, Vectors
from arachnec.kernels.rowwise.row_groups import group_vectors, row_groups
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
    vectors = weight, bias, scale, shift, cu_seqlens, per_row
    y: Tensor = torch.ops.arachnec.norm_modulate(x, *vectors, norm == "layer", eps)[0]
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
    h, y, _, _ = torch.ops.arachnec.gate_residual_norm_modulate(branch, residual, *vectors, norm == "layer", eps)
    return h, y


def _check(norm: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if norm not in NORMS:
        raise ValueError(f"norm is one of {', '.join(NORMS)}, not {norm!r}")
    for vector in (weight, bias):
        if vector is not None and tuple(vector.shape) != (x.shape[-1],):
            raise ValueError(f"weight and bias have shape ({x.shape[-1]},), not {tuple(vector.shape)}")


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _dense(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.stride(-1) == 1 else vector.contiguous()


def _vectors(
    weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, gate: Tensor | None
) -> Vectors:
    return Vectors(_dense(weight), _dense(bias), _dense(scale), _dense(shift), _dense(gate))


def _forward(
    x: Tensor,
    branch: Tensor | None,
    vectors: Vectors,
    cu_seqlens: Tensor | None,
    per_row: bool,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _rows(x)
    side = None if branch is None else _rows(branch)
    groups = row_groups(rows.shape[0], (vectors.gate, vectors.scale, vectors.shift), cu_seqlens, per_row)
    run = norm_launch.forward if x.is_cuda else norm_plain.forward
    with on_device_of(x):
        h, y, mean, rstd = run(rows, side, vectors, groups, layer, eps)
    lead = x.shape[:-1]
    return h.view(x.shape), y.view(x.shape), mean.view(lead) if layer else mean[:0], rstd.view(lead)


def _backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    branch: Tensor | None,
    vectors: Vectors,
    cu_seqlens: Tensor | None,
    per_row: bool,
    layer: bool,
    sums: bool,
) -> Gradients:
    rows, outer = _rows(h), _rows(dy)
    above = None if dh is None else _rows(dh)
    side = None if branch is None else _rows(branch)
    groups = row_groups(rows.shape[0], (vectors.gate, vectors.scale, vectors.shift), cu_seqlens, per_row)
    statistics = mean.reshape(-1), rstd.reshape(-1)
    if h.is_cuda:
        with on_device_of(h):
            found = norm_launch.backward(outer, above, rows, *statistics, side, vectors, groups, layer, sums)
    else:
        center = statistics[0] if layer else torch.zeros_like(statistics[1])
        found = norm_plain.backward(outer, above, rows, center, statistics[1], side, vectors, groups, layer, sums)
    gated = side is not None and vectors.gate is not None
    return found._replace(dx=found.dx.view(h.shape), dbranch=found.dbranch.view(h.shape) if gated else found.dbranch)


@torch.library.custom_op("arachnec::norm_modulate", mutates_args=())
def _norm_modulate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    cu_seqlens: Tensor | None,
    per_row: bool,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the mean (of no elements for RMSNorm) and 1/deviation of each row, in fp32."""
    vectors = _vectors(weight, bias, scale, shift, None)
    return _forward(x, None, vectors, cu_seqlens, per_row, layer, eps)[1:]


@torch.library.custom_op("arachnec::norm_modulate_backward", mutates_args=())
def _norm_modulate_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    cu_seqlens: Tensor | None,
    per_row: bool,
    layer: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dscale, dshift, dweight, dbias; those that are not there, and without ``sums`` all vectors', are empty."""
    vectors = _vectors(weight, bias, scale, shift, None)
    found = _backward(dy, None, x, mean, rstd, None, vectors, cu_seqlens, per_row, layer, sums)
    return found.dx, found.dscale, found.dshift, found.dweight, found.dbias


@torch.library.custom_op("arachnec::gate_residual_norm_modulate", mutates_args=())
def _gate_residual_norm_modulate(
    branch: Tensor,
    residual: Tensor,
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
    """h, y and the statistics of h."""
    vectors = _vectors(weight, bias, scale, shift, gate)
    return _forward(residual, branch, vectors, cu_seqlens, per_row, layer, eps)


@torch.library.custom_op("arachnec::gate_residual_norm_modulate_backward", mutates_args=())
def _gate_residual_norm_modulate_backward(
    dh: Tensor | None,
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    branch: Tensor,
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
    """dresidual, dbranch (empty without a gate: it is dresidual), dgate, dscale, dshift, dweight, dbias."""
    vectors = _vectors(weight, bias, scale, shift, gate)
    return tuple(_backward(dy, dh, h, mean, rstd, branch, vectors, cu_seqlens, per_row, layer, sums))  # type: ignore[return-value]


@_norm_modulate.register_fake
def _(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), *_statistics(x, rest[-2])


@_gate_residual_norm_modulate.register_fake
def _(branch: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(residual), _like(residual), *_statistics(residual, rest[-2])


@_norm_modulate_backward.register_fake
def _(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    weight, bias, scale, shift, _, per_row, _, sums = rest
    return _like(x), *_vector_gradients(x, (scale, None if per_row else shift, weight, bias), sums)


@_gate_residual_norm_modulate_backward.register_fake
def _(dh: Tensor | None, dy: Tensor, h: Tensor, mean: Tensor, rstd: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    branch, gate, weight, bias, scale, shift, _, per_row, _, sums = rest
    dbranch = h.new_empty(0) if gate is None else _like(branch)
    return _like(h), dbranch, *_vector_gradients(h, (gate, scale, None if per_row else shift, weight, bias), sums)


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _statistics(x: Tensor, layer: bool) -> tuple[Tensor, Tensor]:
    dtype = norm_plain.accumulation(x)
    return x.new_empty(x.shape[:-1] if layer else 0, dtype=dtype), x.new_empty(x.shape[:-1], dtype=dtype)


def _vector_gradients(x: Tensor, vectors: tuple[Tensor | None, ...], sums: bool) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(0) if v is None or not sums else v.new_empty(v.shape) for v in vectors)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, bias, scale, shift, cu_seqlens, ctx.per_row, ctx.layer, _ = inputs
    ctx.save_for_backward(x, *output[1:], weight, bias, scale, shift, cu_seqlens)


def _gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpointed forward gives them once
    shift = saved[6]
    wanted = ctx.needs_input_grad[1:5]
    dx, dscale, dshift, dweight, dbias = torch.ops.arachnec.norm_modulate_backward(
        dy, *saved, ctx.per_row, ctx.layer, any(wanted)
    )
    if ctx.per_row and shift is not None:
        dshift = _rows(dy).to(shift.dtype)
    found = (dweight, dbias, dscale, dshift)
    return dx, *(g if want else None for g, want in zip(found, wanted, strict=True)), None, None, None, None


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    branch, _, gate, weight, bias, scale, shift, cu_seqlens, ctx.per_row, ctx.layer, _ = inputs
    h, _, mean, rstd = output
    ctx.save_for_backward(h, mean, rstd, branch, gate, weight, bias, scale, shift, cu_seqlens)
    ctx.set_materialize_grads(False)


def _gated_gradients(ctx: Any, dh: Tensor | None, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpointed forward gives them once
    h, gate, shift = saved[0], saved[4], saved[8]
    wanted = ctx.needs_input_grad[2:7]
    dy = torch.zeros_like(h) if dy is None else dy
    dresidual, dbranch, dgate, dscale, dshift, dweight, dbias = torch.ops.arachnec.gate_residual_norm_modulate_backward(
        dh, dy, *saved, ctx.per_row, ctx.layer, any(wanted)
    )
    if gate is None:
        dbranch = dresidual.to(saved[3].dtype)
    if ctx.per_row and shift is not None:
        dshift = _rows(dy).to(shift.dtype)
    found = (dgate, dweight, dbias, dscale, dshift)
    kept = (g if want else None for g, want in zip(found, wanted, strict=True))
    return dbranch, dresidual, *kept, None, None, None, None


_norm_modulate.register_autograd(_gradients, setup_context=_save)
_gate_residual_norm_modulate.register_autograd(_gated_gradients, setup_context=_save_gated)
