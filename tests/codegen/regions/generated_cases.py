"""Small regions, and their graphs for any batch and number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DIMS = torch.export.Dim.DYNAMIC
ROWS, VECTOR, HEADS = ("B", "S", 12), ("B", 1, 12), ("B", "S", 3, 8)
Shape = tuple[int | str, ...]


def loop(x: Tensor, g: Tensor) -> Tensor:
    return F.silu(x) * torch.sigmoid(g) + x.tanh()


def row(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, None, 1e-6) * s


def read_elsewhere(x: Tensor, s: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    n = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return n, F.gelu(n * s + b, approximate="tanh")


def heads(x: Tensor, w: Tensor) -> Tensor:
    n = F.rms_norm(x, (8,), w, 1e-6)
    lo, hi = n.unflatten(-1, (4, 2)).unbind(-1)
    return torch.stack([-hi, lo], -1).flatten(-2) * 2 + n


def many_heads(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (96,), w, 1e-6).tanh() + F.rms_norm(x, (3, 96), None, 1e-6)


def half(x: Tensor) -> Tensor:
    lo, hi = x.chunk(2, -1)
    return torch.cat([hi * lo, lo - hi], -1)


def across(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x.flatten(2), (24,), w, 1e-6).unflatten(-1, (3, 8)).transpose(1, 2) * 0.5


def flat(x: Tensor, g: Tensor) -> Tensor:
    return x.exp() * g + 1


def joined(text: Tensor, video: Tensor, scale: Tensor, gate: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two lengths, each gated, normed and joined, as CogVideoX does."""
    t, v = text + gate * text.tanh(), video + gate * video.tanh()
    both = torch.cat([F.layer_norm(t, (12,), w) * (1 + scale), F.layer_norm(v, (12,), w) * scale], 1)
    return t, both, v


def parted(x: Tensor, text: Tensor, gate: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slices of tokens, from the front and from the back, read where they lie."""
    tokens = text.shape[1]
    return text + gate * x[:, :tokens], y + gate * x[:, tokens:]


def rotated(x: Tensor, text: Tensor, cos: Tensor, sin: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Norm of all, rotary positions of the tokens behind the caption, written in place."""
    n = F.rms_norm(x, (8,), w, 1e-6)
    video = n[:, :, text.shape[1] :]
    lo, hi = video.unflatten(-1, (4, 2)).unbind(-1)
    rotated = video * cos + torch.stack([-hi, lo], -1).flatten(-2) * sin
    return torch.slice_scatter(n, rotated, 2, text.shape[1]), text * 2


def positions(x: Tensor, place: Tensor, shift: Tensor) -> Tensor:
    return (x + place) * shift


def merged(x: Tensor, y: Tensor) -> Tensor:
    return x.view(y.shape[1], y.shape[0], 12).transpose(0, 1) * y + y.exp()


def centred(x: Tensor, s: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) * s


def attended(x: Tensor, s: Tensor) -> Tensor:
    return torch.softmax(x * 0.3, -1) * s


def standardised(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), x.amax(-1, keepdim=True)


def activations(x: Tensor, g: Tensor) -> Tensor:
    y = F.gelu(x) * F.softplus(g) + x.clamp(-0.5, 0.75) + (x.square() + 1) ** 0.7 + F.mish(g)
    return torch.where(x > g, y, F.leaky_relu(x, 0.1)) + F.hardswish(x) + F.relu(g) + F.elu(x)


def counted(x: Tensor, heads: Tensor) -> Tensor:
    """Positions counted in the region, of heads that are pairs of lanes."""
    place = torch.arange(x.shape[1], device=x.device)[:, None] * torch.arange(1, 5, device=x.device)
    angles = torch.cat([place, place], -1)[:, None].to(x.dtype) * 0.1
    lo, hi = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-hi, lo], -1) * angles.sin() + heads


def joined_widths(x: Tensor, y: Tensor) -> Tensor:
    """Lanes of two widths joined: heads from attention, and a feed-forward's."""
    return torch.cat([x.transpose(1, 2).flatten(2), F.gelu(y, approximate="tanh")], -1)


def scalars(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
    """One value for each row, and one for each sample."""
    return x * s + x.mean(-1, keepdim=True) * w


def widths(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results whose rows have one value, twelve and five."""
    return x.mean(-1, keepdim=True), x.tanh(), y.exp(), y.mean(-1, keepdim=True)


def caption(x: Tensor, text: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A caption whose length no clip changes."""
    n = F.layer_norm(text, (12,)) * scale[:, None]
    return torch.cat([n, F.layer_norm(x, (12,)) * scale[:, None]], 1), n.tanh()


CASES: dict[str, tuple[Callable[..., Any], tuple[Shape, ...]]] = {
    "loop": (loop, (ROWS, VECTOR)),
    "row": (row, (ROWS, VECTOR, (12,))),
    "read elsewhere": (read_elsewhere, (ROWS, VECTOR, VECTOR)),
    "heads": (heads, (HEADS, (8,))),
    "halves": (half, (HEADS,)),
    "across heads": (across, (HEADS, (24,))),
    "one count of rows": (flat, (("S", 5), (5,))),
    "joined": (joined, (("B", "T", 12), ROWS, VECTOR, VECTOR, (12,))),
    "parted": (parted, (("B", "T+S", 12), ("B", "T", 12), VECTOR, ROWS)),
    "rotated behind": (rotated, (("B", 3, "T+S", 8), ("B", "T", 8), ("S", 8), ("S", 8), (8,))),
    "positions": (positions, (ROWS, (1, "S", 12), VECTOR)),
    "merged": (merged, (("S*B", 12), ROWS)),
    "centred": (centred, (ROWS, VECTOR)),
    "attended": (attended, (("B", 3, "S", "T"), ("B", 1, 1, "T"))),
    "as wide as clips": (standardised, (("B", "S", "T"),)),
    "activations": (activations, (ROWS, ROWS)),
    "counted": (counted, (HEADS, (3, 8))),
    "joined widths": (joined_widths, (("B", 3, "S", 8), ("B", "S", 48))),
    "scalars": (scalars, (ROWS, ("B", 1, 1), ("B", "S", 1))),
    "means": (lambda x, w: x.tanh() + x.mean(-1, keepdim=True) * w, (ROWS, (1,))),
    "widths": (widths, (ROWS, ("B", "S", 5))),
    "caption": (caption, (ROWS, ("B", 7, 12), ("B", 12))),
    "tiles": (row, (("B", "S", 640), ("B", 1, 640), (640,))),
    "wide sums": (row, (("B", "S", 9000), ("B", 1, 9000), (9000,))),
    "tiles of heads": (many_heads, (("B", "S", 3, 96), (96,))),
}


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


def sized(shape: Shape, sizes: dict[str, int]) -> list[int]:
    """A shape whose symbols, and sums and products of two, have these sizes."""
    return [eval(dim, dict(sizes)) if isinstance(dim, str) else dim for dim in shape]


def region(
    function: Callable[..., Any], shapes: tuple[Shape, ...], dtype: torch.dtype, device: str = "cpu"
) -> torch.fx.GraphModule:
    inputs = tuple(torch.randn(sized(shape, {"B": 3, "S": 7, "T": 4}), dtype=dtype, device=device) for shape in shapes)
    dims = tuple({k: DIMS for k, d in enumerate(shape) if isinstance(d, str)} for shape in shapes)
    exported = torch.export.export(Function(function), inputs, dynamic_shapes=(dims,), strict=False)
    return exported.graph_module
