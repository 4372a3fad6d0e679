"""Launches the Triton kernels of ``norm_rows`` on rows [N, H], and finishes their column sums."""

from __future__ import annotations

import torch
from torch import Tensor

from arachnec.kernels.rowwise.norm_plain import Gradients, Vectors, empties
from arachnec.kernels.rowwise.norm_rows import norm_backward, norm_forward
from arachnec.kernels.rowwise.row_groups import RowGroups
from arachnec.kernels.rowwise.row_launch import Launch, device_of, launch_of, sum_partials


def _step(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.stride(0)


def forward_launch(x: Tensor, branch: Tensor | None, vectors: Vectors) -> Launch:
    constant = 1 + (vectors.shift is not None or vectors.bias is not None) + (vectors.gate is not None)
    inputs = 1 if branch is None else 2
    return launch_of(x.shape[1], inputs + constant, inputs, x.element_size(), device_of(x), x.shape[0])


def forward(
    x: Tensor,
    branch: Tensor | None,
    vectors: Vectors,
    groups: RowGroups,
    layer: bool,
    eps: float,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``norm_plain.forward``."""
    rows, hidden = x.shape
    launch = launch or forward_launch(x, branch, vectors)
    h = x if branch is None else torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows if layer else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        run = groups.run(launch.slots)
        norm_forward[(groups.programs(run),)](
            x, branch, vectors.gate, vectors.weight, vectors.bias, vectors.scale, vectors.shift, groups.lengths,
            None if branch is None else h, y, mean, rstd,
            x.stride(0), _step(branch), _step(vectors.gate), _step(vectors.scale), _step(vectors.shift),
            groups.loops, groups.group_rows, run, eps,
            H=hidden, TILE=launch.tile, LAYER=layer, PER_ROW=groups.per_row, SEGMENTS=groups.segments,
            STAGES=launch.stages, **launch.options,
        )  # fmt: skip
    return h, y, mean, rstd


def backward_launch(h: Tensor, dh: Tensor | None, branch: Tensor | None, sums: int) -> Launch:
    inputs = 2 + (dh is not None) + (branch is not None)
    vectors = 3 + (branch is not None) + sums
    return launch_of(h.shape[1], vectors, inputs, h.element_size(), device_of(h))


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
    sums: bool,
    launch: Launch | None = None,
) -> Gradients:
    """As ``norm_plain.backward``."""
    rows, hidden = h.shape
    weight, bias, scale, shift, gate = vectors
    per_row = groups.per_row
    grouped = sums and not per_row
    gated = branch is not None and gate is not None
    sum_product = sums and (weight is not None or (grouped and scale is not None))
    sum_grad = sums and (bias is not None or (grouped and shift is not None))
    sum_gate = grouped and gated
    kinds = sum_product + sum_grad + sum_gate
    launch = launch or backward_launch(h, dh, branch if gated else None, kinds)
    run = groups.run(launch.slots)

    def rows_like(tensor: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty(rows, hidden, dtype=tensor.dtype, device=h.device) if tensor is not None and wanted else None

    dx = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    dbranch = rows_like(branch, gated)
    dscale = rows_like(scale, sums and per_row)
    dgate = rows_like(gate, sums and per_row and gated)
    partials = torch.empty(groups.programs(run), kinds, hidden, dtype=torch.float32, device=h.device)
    if rows:
        norm_backward[(groups.programs(run),)](
            dy, dh, h, mean, rstd, branch if gated else None, gate if gated else None, weight, bias, scale,
            groups.lengths, dx, dbranch, dscale, dgate, partials,
            dy.stride(0), _step(dh), h.stride(0), _step(branch), _step(gate), _step(scale),
            groups.loops, groups.group_rows, run,
            H=hidden, TILE=launch.tile, LAYER=layer, PER_ROW=per_row, SEGMENTS=groups.segments,
            STAGES=launch.stages, SUM_PRODUCT=sum_product, SUM_GRAD=sum_grad, SUM_GATE=sum_gate,
            **launch.options,
        )  # fmt: skip
    grads = Gradients(dx, *(t if t is not None else h.new_empty(0) for t in (dbranch, dgate, dscale)), *empties(h, 3))
    if not kinds:
        return grads
    product_dtype = scale.dtype if grouped and scale is not None and weight is None and bias is None else torch.float32
    grad_dtype = shift.dtype if grouped and shift is not None and bias is None else torch.float32
    gate_dtype = torch.float32 if gate is None else gate.dtype
    chosen = ((sum_product, product_dtype), (sum_grad, grad_dtype), (sum_gate, gate_dtype))
    columns = list(sum_partials(partials, groups, run, tuple(dtype for wanted, dtype in chosen if wanted)))
    if sum_gate:
        grads = grads._replace(dgate=columns.pop())
    if weight is not None and sum_product:
        grads = grads._replace(dweight=_total(columns[0], scale, per_row).to(weight.dtype))
    if bias is not None and sum_grad:
        grads = grads._replace(dbias=_total(columns[-1], scale, per_row).to(bias.dtype))
    if grouped and scale is not None:
        product = columns[0] if weight is None else columns[0] * weight.float()
        grads = grads._replace(
            dscale=(product if bias is None else product + columns[-1] * bias.float()).to(scale.dtype)
        )
    if grouped and shift is not None and sum_grad:
        grads = grads._replace(dshift=columns[-1].to(shift.dtype))
    return grads


def _total(columns: Tensor, scale: Tensor | None, per_row: bool) -> Tensor:
    """A sum over all rows from sums by group, which per row already carry 1 + scale."""
    return columns.sum(0) if scale is None or per_row else (columns * (1 + scale.float())).sum(0)
