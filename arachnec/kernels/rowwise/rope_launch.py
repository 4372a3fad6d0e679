"""Launches the Triton kernels of ``rope_rows`` on tensors [B, S, heads, D] of any strides, the last of 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from arachnec.kernels.rowwise.rope_plain import Rope
from arachnec.kernels.rowwise.rope_rows import rope_backward, rope_forward
from arachnec.kernels.rowwise.row_groups import RowGroups
from arachnec.kernels.rowwise.row_launch import LARGEST_ROW, Launch, device_of, launch_of_tiles, sum_partials

WIDEST_TILE = 2048


def head_tile(heads: int, size: int) -> tuple[int, int]:
    """Heads of a tile and pairs of a head, powers of two: at most 8 tiles, the fewest idle heads, then the widest."""
    pairs = max(1, 1 << (math.ceil(size / 2) - 1).bit_length())
    if heads * size > LARGEST_ROW or size % 2:
        raise ValueError(
            f"{heads} heads of {size} values; the kernels take an even size and {LARGEST_ROW} values in all"
        )
    counts = [1 << k for k in range(12) if (1 << k) * 2 * pairs <= WIDEST_TILE or k == 0]
    return min((c for c in counts if math.ceil(heads / c) <= 8 or c == counts[-1]), key=lambda c: (-(-heads // c) * c, -c)), pairs  # fmt: skip  # noqa: E501


def wide(table: Tensor | None, size: int) -> bool:
    """Whether a table has an angle for each place of a head, not one for each pair."""
    return table is not None and table.shape[1] == size


def rope_launch(x: Tensor, vectors: int, inputs: int, rows: int = 0) -> Launch:
    count, pairs = head_tile(x.shape[2], x.shape[3])
    lanes = math.ceil(x.shape[2] / count) * count * 2 * pairs
    return launch_of_tiles(count * 2 * pairs, lanes, vectors, inputs * lanes * x.element_size(), device_of(x), rows)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rope: Rope,
    eps: float,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``rope_plain.forward``; the mean has no elements for RMSNorm."""
    batch, sequence, heads, size = x.shape
    count, pairs = head_tile(heads, size)
    resident = rope.across * ((weight is not None) + (bias is not None))
    launch = launch or rope_launch(x, 3 + resident, 1, batch * sequence)
    y = torch.empty_like(x)
    units = (batch, sequence, 1 if rope.across else heads)
    mean = torch.empty(units if rope.layer else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(units, dtype=torch.float32, device=x.device)
    groups = RowGroups(batch * sequence, 1)
    if x.numel():
        run = groups.run(launch.slots)
        rope_forward[(groups.programs(run),)](
            x, weight, bias, cos, sin, y, mean, rstd, *x.stride()[:3], *y.stride()[:3],
            batch * sequence, sequence, 1 if cos is None else cos.shape[0], run, eps,
            N_HEADS=heads, D=size, HEADS=count, PAIRS=pairs, LAYER=rope.layer, ACROSS=rope.across,
            INTERLEAVED=rope.interleaved, WIDE=wide(cos, size), STAGES=launch.stages, **launch.options,
        )  # fmt: skip
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rope: Rope,
    sum_product: bool,
    sum_grad: bool,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and in fp32 the sums for weight and bias where wanted (else empty)."""
    batch, sequence, heads, size = x.shape
    count, pairs = head_tile(heads, size)
    resident = rope.across * ((weight is not None) + sum_product + sum_grad)
    launch = launch or rope_launch(x, 5 + resident, 2)
    dx = torch.empty_like(x)
    groups = RowGroups(batch * sequence, 1)
    run = groups.run(launch.slots)
    kinds = sum_product + sum_grad
    width = heads * size if rope.across else size
    partials = torch.empty(groups.programs(run), kinds, width, dtype=torch.float32, device=x.device)
    if x.numel():
        rope_backward[(groups.programs(run),)](
            dy, x, mean, rstd, weight, cos, sin, dx, partials,
            *dy.stride()[:3], *x.stride()[:3], *dx.stride()[:3],
            batch * sequence, sequence, 1 if cos is None else cos.shape[0], run,
            N_HEADS=heads, D=size, HEADS=count, PAIRS=pairs, LAYER=rope.layer, ACROSS=rope.across,
            INTERLEAVED=rope.interleaved, WIDE=wide(cos, size), STAGES=launch.stages,
            SUM_PRODUCT=sum_product, SUM_GRAD=sum_grad, **launch.options,
        )  # fmt: skip
    sums = list(sum_partials(partials, groups, run, (torch.float32,) * kinds))
    product = sums.pop(0)[0] if sum_product else x.new_empty(0, dtype=torch.float32)
    grad = sums.pop(0)[0] if sum_grad else x.new_empty(0, dtype=torch.float32)
    return dx, product, grad
