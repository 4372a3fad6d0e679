"""Every launch of the kernels at one size on tensors without storage, for ``kernel_speed.py`` to compile."""

from __future__ import annotations

import torch
from torch import Tensor

from arachnec.kernels import bias_gelu, norm_launch, rope_launch
from arachnec.kernels.norm_plain import Vectors
from arachnec.kernels.rope_plain import Rope
from arachnec.kernels.row_groups import RowGroups

TOKENS, HEAD = 32760, 128


def launch_all(hidden: int, layout: str, dtype: torch.dtype) -> None:
    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = 4 if layout == "batch 4" else 1
    count = 4 if layout == "packed" else batch
    lengths = meta(count + 1, dtype=torch.int32) if layout == "packed" else None
    groups = RowGroups(batch * TOKENS, count, lengths)
    x = meta(groups.rows, hidden)
    for side in (None, x):
        scale, shift, gate = (meta(count, hidden, dtype=torch.float32) for _ in range(3))
        vectors = Vectors(None, None, scale, shift, None if side is None else gate)
        h, y, mean, rstd = norm_launch.forward(x, side, vectors, groups, True, 1e-6)
        norm_launch.backward(y, side, h, mean, rstd, side, vectors, groups, True, True)
    heads = meta(batch, TOKENS, hidden // HEAD, HEAD)
    angles = meta(TOKENS, HEAD // 2, dtype=torch.float32)
    for across in (True, False):
        weight, rope = meta(hidden if across else HEAD), Rope(across, layer=False, interleaved=True)
        turned, mean, rstd = rope_launch.forward(heads, weight, None, angles, angles, rope, 1e-6)
        rope_launch.backward(turned, heads, mean, rstd, weight, angles, angles, rope, True, False)
    bias = meta(hidden)
    bias_gelu.launch_backward(bias_gelu.launch_forward(x, bias, True), x, bias, True, True)
