"""residual + gate * branch as an operator: the end of an adaptive block. Its backward also sums the gate's gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.rowwise.gate_rows import gate_backward, gate_forward
from arachnec.kernels.rowwise.norm_plain import accumulation
from arachnec.kernels.rowwise.row_groups import RowGroups, dense, group_vectors, row_groups, rows_of
from arachnec.kernels.rowwise.row_launch import Launch, column_launch, on_device_of, sum_partials

ROWS = 4


def gate_residual(branch: Tensor, residual: Tensor, gate: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """residual + gate * branch over rows [..., H], in the residual's dtype.

    ``gate`` is [H], per sample [B, H] or [B, 1, H], per token [B, S, H], or, with ``cu_seqlens`` [G + 1], per segment
    of a packed sequence [G, H]. Raises ValueError for other shapes. Its gradients have no gradients.
    """
    if branch.shape != residual.shape:
        raise ValueError(f"branch {tuple(branch.shape)} and residual {tuple(residual.shape)} differ in shape")
    (grouped,), per_row = group_vectors(residual, (gate,), cu_seqlens)
    h: Tensor = torch.ops.arachnec.gate_residual(branch, residual, grouped, cu_seqlens, per_row)
    return h


def launch_forward(
    branch: Tensor, residual: Tensor, gate: Tensor, groups: RowGroups, launch: Launch | None = None
) -> Tensor:
    """Of rows [N, H] with gates [groups, H]."""
    rows, width = residual.shape
    launch = launch or column_launch(residual)
    h = torch.empty(rows, width, dtype=residual.dtype, device=residual.device)
    if residual.numel():
        run = groups.run(launch.slots)
        gate_forward[(groups.programs(run), math.ceil(width / launch.tile))](
            branch, residual, gate, groups.lengths, h, branch.stride(0), residual.stride(0), gate.stride(0),
            groups.loops, groups.group_rows, run,
            F=width, TILE=launch.tile, ROWS=ROWS, PER_ROW=groups.per_row, SEGMENTS=groups.segments,
            STAGES=launch.stages, **launch.options,
        )  # fmt: skip
    return h


def launch_backward(
    dh: Tensor, branch: Tensor, gate: Tensor, groups: RowGroups, summed: bool, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """dbranch [N, H] and dgate [groups, H] (empty unless ``summed``)."""
    rows, width = branch.shape
    launch = launch or column_launch(branch)
    run = groups.run(launch.slots)
    grouped = summed and not groups.per_row
    dbranch = torch.empty(rows, width, dtype=branch.dtype, device=branch.device)
    dgate = torch.empty(rows, width, dtype=gate.dtype, device=gate.device) if summed and groups.per_row else None
    partials = torch.empty(groups.programs(run), int(grouped), width, dtype=torch.float32, device=branch.device)
    if branch.numel():
        gate_backward[(groups.programs(run), math.ceil(width / launch.tile))](
            dh, branch, gate, groups.lengths, dbranch, dgate, partials, dh.stride(0), branch.stride(0), gate.stride(0),
            groups.loops, groups.group_rows, run,
            F=width, TILE=launch.tile, ROWS=ROWS, PER_ROW=groups.per_row, SEGMENTS=groups.segments,
            STAGES=launch.stages, SUM=grouped, **launch.options,
        )  # fmt: skip
    if grouped:
        return dbranch, sum_partials(partials, groups, run, (gate.dtype,))[0]
    return dbranch, branch.new_empty(0) if dgate is None else dgate


@torch.library.custom_op("arachnec::gate_residual", mutates_args=())
def _gate_residual(branch: Tensor, residual: Tensor, gate: Tensor, cu_seqlens: Tensor | None, per_row: bool) -> Tensor:
    side, rows = rows_of(branch), rows_of(residual)
    groups = row_groups(rows.shape[0], (gate,), cu_seqlens, per_row)
    if residual.is_cuda:
        with on_device_of(residual):
            return launch_forward(side, rows, dense(gate), groups).view(residual.shape)
    dtype = accumulation(residual)
    h = rows.to(dtype) + groups.spread(gate.to(dtype)) * side.to(dtype)
    return h.to(residual.dtype).reshape(residual.shape)


@torch.library.custom_op("arachnec::gate_residual_backward", mutates_args=())
def _gate_residual_backward(
    dh: Tensor, branch: Tensor, gate: Tensor, cu_seqlens: Tensor | None, per_row: bool, summed: bool
) -> tuple[Tensor, Tensor]:
    """dbranch, and dgate as large as the gate (empty unless ``summed``)."""
    side, outer = rows_of(branch), rows_of(dh)
    groups = row_groups(side.shape[0], (gate,), cu_seqlens, per_row)
    if branch.is_cuda:
        with on_device_of(branch):
            dbranch, dgate = launch_backward(outer, side, dense(gate), groups, summed)
        return dbranch.view(branch.shape), dgate
    dtype = accumulation(branch)
    dbranch = (outer.to(dtype) * groups.spread(gate.to(dtype))).to(branch.dtype).reshape(branch.shape)
    if not summed:
        return dbranch, branch.new_empty(0)
    return dbranch, groups.sum(outer.to(dtype) * side.to(dtype)).to(gate.dtype)


@_gate_residual.register_fake
def _(branch: Tensor, residual: Tensor, *_: Any) -> Tensor:
    return residual.new_empty(residual.shape)


@_gate_residual_backward.register_fake
def _(
    dh: Tensor, branch: Tensor, gate: Tensor, cu_seqlens: Tensor | None, per_row: bool, summed: bool
) -> tuple[Tensor, Tensor]:
    return branch.new_empty(branch.shape), gate.new_empty(gate.shape) if summed else branch.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    branch, _, gate, cu_seqlens, ctx.per_row = inputs
    ctx.save_for_backward(branch, gate, cu_seqlens)


def _gradients(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[2]
    dbranch, dgate = torch.ops.arachnec.gate_residual_backward(dh, *ctx.saved_tensors, ctx.per_row, wanted)
    return dbranch, dh, dgate if wanted else None, None, None


_gate_residual.register_autograd(_gradients, setup_context=_save)
