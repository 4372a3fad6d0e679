"""Runs the RoPE kernels in Triton\'s interpreter; ``main`` gives {case: {tensor: error}}."""

import torch

from arachnec.kernels.rowwise import rope_launch, rope_plain
from arachnec.kernels.rowwise.rope_plain import Rope
from arachnec.kernels.rowwise.row_launch import Launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def errors(
    across: bool,
    layer: bool,
    interleaved: bool,
    shape: tuple[int, ...],
    positions: str,
    heads_first: bool,
    dtype: str,
    wide: bool = False,
) -> dict[str, float]:
    torch.manual_seed(1)
    batch, tokens, heads, size = shape
    stored, rope = DTYPES[dtype], Rope(across, layer, interleaved)
    tensors = [torch.randn(batch, heads, tokens, size) if heads_first else torch.randn(shape) for _ in range(2)]
    x, dy = (t.transpose(1, 2).to(stored) if heads_first else t.to(stored) for t in tensors)
    width = heads * size if across else size
    weight, bias = torch.randn(width).to(stored), torch.randn(width).to(stored) if layer else None
    rows = {"none": 0, "shared": tokens, "own": batch * tokens}[positions]
    columns = size if wide else size // 2  # wide ones need be no angles: both places are independent
    cos, sin = (torch.randn(rows, columns), torch.randn(rows, columns)) if rows else (None, None)
    launch = Launch(0, 1, 1, 255, 3)
    y, mean, rstd = rope_launch.forward(x, weight, bias, cos, sin, rope, 1e-6, launch)
    dx, dweight, dbias = rope_launch.backward(dy, x, mean, rstd, weight, cos, sin, rope, True, layer, launch)
    assert dx.stride() == y.stride() == torch.empty_like(x).stride()
    exact = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    tables = [t if t is None else t.double() for t in (cos, sin)]
    truth = rope_plain.forward(*exact, *tables, rope, 1e-6)[0]
    truth.backward(dy.double())
    pairs = {"y": (y, truth), "dx": (dx, exact[0].grad), "dweight": (dweight, exact[1].grad)}
    if layer:
        pairs["dbias"] = (dbias, exact[2].grad)
    return {name: float((got.double() - want).abs().max() / want.abs().max()) for name, (got, want) in pairs.items()}


def main() -> dict[str, dict[str, float]]:
    cases = [
        (True, False, True, (2, 4, 3, 8), "shared", False, "fp32"),
        (True, False, False, (1, 5, 3, 6), "own", False, "fp32"),
        (False, False, True, (2, 3, 3, 8), "own", True, "fp32"),
        (False, True, True, (1, 5, 2, 12), "shared", True, "fp32"),
        (False, False, False, (2, 3, 10, 8), "shared", False, "bf16"),
        (True, True, True, (2, 3, 10, 8), "none", False, "bf16"),
        (False, True, False, (1, 4, 3, 4), "none", False, "fp32"),
        (False, False, True, (2, 3, 3, 8), "shared", False, "fp32", True),
        (True, False, False, (1, 5, 3, 6), "own", False, "fp32", True),
        (False, True, True, (2, 3, 3, 12), "own", True, "bf16", True),
    ]
    return {" ".join(map(str, case)): errors(*case) for case in cases}
