"""gelu(x + bias) as an operator: the activation of a feed-forward, whose backward also sums the bias's gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.rowwise.gelu_rows import gelu_backward, gelu_forward
from arachnec.kernels.rowwise.norm_plain import accumulation
from arachnec.kernels.rowwise.row_groups import RowGroups, rows_of
from arachnec.kernels.rowwise.row_launch import Launch, column_launch, on_device_of, sum_partials

APPROXIMATIONS = ("none", "tanh")
ROWS = 4


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(x + bias) over x [..., F] with ``bias`` [F], in x's dtype; ``approximate`` as in torch's gelu.

    Gaussian error linear units (arXiv 1606.08415). Raises ValueError for another shape or approximation.
    """
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate is one of {', '.join(APPROXIMATIONS)}, not {approximate!r}")
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"bias has shape ({x.shape[-1]},), not {tuple(bias.shape)}")
    y: Tensor = torch.ops.arachnec.bias_gelu(x, bias, approximate == "tanh")
    return y


def launch_forward(x: Tensor, bias: Tensor | None, tanh: bool, launch: Launch | None = None) -> Tensor:
    """Of rows [N, F]."""
    rows, width = x.shape
    launch = launch or column_launch(x)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    groups = RowGroups(rows, 1)
    if x.numel():
        run = groups.run(launch.slots)
        gelu_forward[(groups.programs(run), math.ceil(width / launch.tile))](
            x, bias, y, x.stride(0), rows, run,
            F=width, TILE=launch.tile, ROWS=ROWS, TANH=tanh, STAGES=launch.stages, **launch.options,
        )  # fmt: skip
    return y


def launch_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, summed: bool, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """dx [N, F], and its column sums [F] in fp32 (empty unless ``summed``)."""
    rows, width = x.shape
    launch = launch or column_launch(x)
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    groups = RowGroups(rows, 1)
    run = groups.run(launch.slots)
    partials = torch.empty(groups.programs(run), int(summed), width, dtype=torch.float32, device=x.device)
    if x.numel():
        gelu_backward[(groups.programs(run), math.ceil(width / launch.tile))](
            dy, x, bias, dx, partials, dy.stride(0), x.stride(0), rows, run,
            F=width, TILE=launch.tile, ROWS=ROWS, TANH=tanh, STAGES=launch.stages, SUM=summed, **launch.options,
        )  # fmt: skip
    if not summed:
        return dx, x.new_empty(0, dtype=torch.float32)
    return dx, sum_partials(partials, groups, run, (torch.float32,))[0][0]


def _plain_slope(u: Tensor, tanh: bool) -> Tensor:
    if not tanh:
        return 0.5 * (1 + torch.erf(u * math.sqrt(0.5))) + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    scale = 2 * math.sqrt(2 / math.pi)
    part = torch.sigmoid(scale * (u + 0.044715 * u**3))
    return part + u * part * (1 - part) * scale * (1 + 3 * 0.044715 * u * u)


@torch.library.custom_op("arachnec::bias_gelu", mutates_args=())
def _bias_gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    if x.is_cuda:
        with on_device_of(x):
            return launch_forward(rows_of(x), None if bias is None else bias.contiguous(), tanh).view(x.shape)
    dtype = accumulation(x)
    u = x.to(dtype) if bias is None else x.to(dtype) + bias.to(dtype)
    return torch.nn.functional.gelu(u, approximate="tanh" if tanh else "none").to(x.dtype).contiguous()


@torch.library.custom_op("arachnec::bias_gelu_backward", mutates_args=())
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, summed: bool) -> tuple[Tensor, Tensor]:
    """dx, and the bias's gradient (empty unless there is a bias and ``summed``)."""
    wanted = summed and bias is not None
    if x.is_cuda:
        dense = None if bias is None else bias.contiguous()
        with on_device_of(x):
            dx, total = launch_backward(rows_of(dy), rows_of(x), dense, tanh, wanted)
    else:
        dtype = accumulation(x)
        u = x.to(dtype) if bias is None else x.to(dtype) + bias.to(dtype)
        inner = dy.to(dtype) * _plain_slope(u, tanh)
        total = inner.reshape(-1, x.shape[-1]).sum(0)
        dx = inner.to(x.dtype).contiguous()
    return dx.view(x.shape), total.to(bias.dtype) if wanted and bias is not None else x.new_empty(0)


@_bias_gelu.register_fake
def _(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@_bias_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool, summed: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if bias is None or not summed else bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    wanted = ctx.needs_input_grad[1]
    dx, dbias = torch.ops.arachnec.bias_gelu_backward(dy, *ctx.saved_tensors, ctx.tanh, wanted)
    return dx, dbias if wanted else None, None


_bias_gelu.register_autograd(_gradients, setup_context=_save)
