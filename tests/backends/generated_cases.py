"""Small regions, and their graphs for any batch and number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DIMS = {"B": torch.export.Dim("B"), "S": torch.export.Dim("S")}
ROWS, VECTOR, HEADS = ("B", "S", 12), ("B", 1, 12), ("B", "S", 3, 8)
Shape = tuple[int | str, ...]


def loop(x: Tensor, g: Tensor) -> Tensor:
    return F.silu(x) * torch.sigmoid(g) + x.tanh()


def row(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (12,), w, None, 1e-6) * s


def read_elsewhere(x: Tensor, s: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return n, F.gelu(n * s + b, approximate="tanh")


def heads(x: Tensor, w: Tensor) -> Tensor:
    n = F.rms_norm(x, (8,), w, 1e-6)
    lo, hi = n.unflatten(-1, (4, 2)).unbind(-1)
    return torch.stack([-hi, lo], -1).flatten(-2) * 2 + n


def half(x: Tensor) -> Tensor:
    lo, hi = x.chunk(2, -1)
    return torch.cat([hi * lo, lo - hi], -1)


def across(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x.flatten(2), (24,), w, 1e-6).unflatten(-1, (3, 8)).transpose(1, 2) * 0.5


def flat(x: Tensor, g: Tensor) -> Tensor:
    return x.exp() * g + 1


CASES: dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]] = {
    "loop": (loop, (ROWS, VECTOR)),
    "row": (row, (ROWS, VECTOR, (12,))),
    "read elsewhere": (read_elsewhere, (ROWS, VECTOR, VECTOR)),
    "heads": (heads, (HEADS, (8,))),
    "halves": (half, (HEADS,)),
    "across heads": (across, (HEADS, (24,))),
    "one count of rows": (flat, (("S", 5), (5,))),
}


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


def region(function: Callable[..., Any], shapes: tuple[Shape, ...], dtype: torch.dtype) -> torch.fx.GraphModule:
    inputs = tuple(torch.randn([{"B": 3, "S": 7}.get(d, d) for d in shape], dtype=dtype) for shape in shapes)
    dims = tuple({k: DIMS[d] for k, d in enumerate(shape) if isinstance(d, str)} for shape in shapes)
    exported = torch.export.export(Function(function), inputs, dynamic_shapes=(dims,), strict=False)
    return exported.graph_module
