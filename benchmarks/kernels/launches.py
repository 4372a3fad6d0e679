"""Every launch of the kernels at one size on tensors without storage, for ``benchmarks/kernels`` to compile."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from arachnec.kernels.rowwise import bias_gelu, gate_residual, norm_launch, rope_launch
from arachnec.kernels.rowwise.norm_plain import Vectors
from arachnec.kernels.rowwise.rope_plain import Rope
from arachnec.kernels.rowwise.row_groups import RowGroups

HEAD = 128


def launch_all(tokens: int, hidden: int, layout: str, dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yields the case and the pass whose launches were made since the last time."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = 4 if layout == "batch 4" else 1
    count = 4 if layout == "packed" else batch
    lengths = meta(count + 1, dtype=torch.int32) if layout == "packed" else None
    groups = RowGroups(batch * tokens, count, lengths)
    x = meta(groups.rows, hidden)
    for side in (None, x):
        scale, shift, gate = (meta(count, hidden, dtype=torch.float32) for _ in range(3))
        vectors = Vectors(None, None, scale, shift, None if side is None else gate)
        case = "norm, modulate" if side is None else "gate, residual, norm, modulate"
        h, y, mean, rstd = norm_launch.forward(x, side, vectors, groups, True, 1e-6)
        yield case, "forward"
        norm_launch.backward(y, side, h, mean, rstd, side, vectors, groups, True, True)
        yield case, "backward"
    gate_residual.launch_forward(x, x, gate, groups)
    yield "gate, residual", "forward"
    gate_residual.launch_backward(x, x, gate, groups, True)
    yield "gate, residual", "backward"
    heads = meta(batch, tokens, hidden // HEAD, HEAD)
    angles = meta(tokens, HEAD // 2, dtype=torch.float32)
    for across in (True, False):
        weight, rope = meta(hidden if across else HEAD), Rope(across, layer=False, interleaved=True)
        case = "norm across heads, RoPE" if across else "norm per head, RoPE"
        rotated, mean, rstd = rope_launch.forward(heads, weight, None, angles, angles, rope, 1e-6)
        yield case, "forward"
        rope_launch.backward(rotated, heads, mean, rstd, weight, angles, angles, rope, True, False)
        yield case, "backward"
    bias = meta(hidden)
    z = bias_gelu.launch_forward(x, bias, True)
    yield "bias, GELU", "forward"
    bias_gelu.launch_backward(z, x, bias, True, True)
    yield "bias, GELU", "backward"
