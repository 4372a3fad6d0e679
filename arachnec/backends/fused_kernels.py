"""What a fused region calls for each kernel that was matched: the kernel's own function, or a few views around it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """``call`` takes the roles of a match as keywords; ``returns`` are the roles of its results, in order.

    ``constant`` are the operands that get no gradient from it.
    """

    call: Callable[..., Any]
    returns: tuple[str, ...]
    constant: tuple[str, ...] = ()


def _norm_modulate(**arguments: Any) -> Any:
    return _kernel("norm_modulate", "norm_modulate")(**arguments)


def _gate_residual_norm_modulate(**arguments: Any) -> Any:
    return _kernel("norm_modulate", "gate_residual_norm_modulate")(**arguments)


def _bias_gelu(**arguments: Any) -> Any:
    return _kernel("bias_gelu", "bias_gelu")(**arguments)


def _gate_residual(**arguments: Any) -> Any:
    return _kernel("gate_residual", "gate_residual")(**arguments)


def _norm_rope(
    x: Tensor,
    heads: int,
    size: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    layout: str = "tokens",
    turned: str = "all",
    **how: Any,
) -> Any:
    """``x`` is [B, S, heads, size] or with the last two in one, or, where ``layout`` is "heads", [B, heads, S, size].

    The result is [B, S, heads, size], like x where the layout is "heads" or "rows", or has its "pairs" apart,
    [..., size / 2, 2]. Where not all tokens are ``turned``, the tables are of those in "front" or at the "back".
    """
    x = x.transpose(1, 2) if layout == "heads" else x
    batch, tokens = x.shape[:2]
    tables = {}
    if cos is not None and sin is not None:
        tables = {
            role: _padded(table.flatten(0, -2), tokens, turned, still)
            for role, table, still in (("cos", cos, 1.0), ("sin", sin, 0.0))
        }
    y = _kernel("norm_rope", "norm_rope")(x.reshape(batch, tokens, heads, size), **tables, **how)
    if layout == "heads":
        return y.transpose(1, 2)
    if layout == "rows":
        return y.reshape(x.shape)
    return y.reshape(batch, tokens, heads, size // 2, 2) if layout == "pairs" else y


def _padded(table: Tensor, tokens: int, turned: str, still: float) -> Tensor:
    """A table of all tokens from that of some: the others keep their place."""
    if turned == "all":
        return table
    rest = table.new_full((tokens - table.shape[0], table.shape[1]), still)
    return torch.cat([table, rest] if turned == "front" else [rest, table])


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """Imported when first called: Triton is not needed to plan."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"arachnec.kernels.{module}"), name)
    return found


KERNELS = {
    "norm_modulate": Kernel(_norm_modulate, ("y",)),
    "gate_residual_norm_modulate": Kernel(_gate_residual_norm_modulate, ("h", "y")),
    "norm_rope": Kernel(_norm_rope, ("y",), constant=("cos", "sin")),
    "gate_residual": Kernel(_gate_residual, ("h",)),
    "bias_gelu": Kernel(_bias_gelu, ("y",)),
}
