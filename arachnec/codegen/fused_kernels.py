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


def _norm_modulate(x: Tensor, **arguments: Any) -> Any:
    return _kernel("norm_modulate", "norm_modulate")(x=x, **_vectors(x, arguments))


def _gate_residual_norm_modulate(residual: Tensor, **arguments: Any) -> Any:
    call = _kernel("norm_modulate", "gate_residual_norm_modulate")
    return call(residual=residual, **_vectors(residual, arguments))


def _bias_gelu(**arguments: Any) -> Any:
    return _kernel("bias_gelu", "bias_gelu")(**arguments)


def _gate_residual(residual: Tensor, **arguments: Any) -> Any:
    return _kernel("gate_residual", "gate_residual")(residual=residual, **_vectors(residual, arguments))


def _vectors(x: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` whose vectors have as many dimensions as rows x have at most: [B, S, 1, H] is [B, S, H]."""
    vectors = dict(arguments)
    for role in ("scale", "shift", "gate"):
        while role in vectors and vectors[role].dim() > x.dim():
            vectors[role] = vectors[role].squeeze(-2)
    return vectors


def _norm_rope(
    x: Tensor,
    heads: int,
    size: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    layout: str = "tokens",
    rotated: str = "all",
    pairs: bool = False,
    number: bool = False,
    **how: Any,
) -> Any:
    """``x`` is [B, S, heads, size] or with the last two in one, or, where ``layout`` is "heads", [B, heads, S, size].

    The result is [B, S, heads, size], or like x where the layout is "heads" or "rows"; with its ``pairs`` apart,
    [..., size / 2, 2], or each a complex ``number``. ``freqs_cis`` is complex, cos + i sin. Where only the tokens
    in "front" or at the "back" are ``rotated``, the tables are of these.
    """
    x = x.transpose(1, 2) if layout == "heads" else x
    batch, tokens = x.shape[:2]
    tables = {}
    if freqs_cis is not None:
        cos, sin = freqs_cis.real.float(), freqs_cis.imag.float()
    if cos is not None and sin is not None:
        tables = {
            role: _padded(table.flatten(0, -2), tokens, rotated, neutral)
            for role, table, neutral in (("cos", cos, 1.0), ("sin", sin, 0.0))
        }
    y = _kernel("norm_rope", "norm_rope")(x.reshape(batch, tokens, heads, size), **tables, **how)
    if layout == "heads":
        y = y.transpose(1, 2)
    elif layout == "rows":
        y = y.reshape(x.shape)
    if not pairs and not number:
        return y
    apart = y.unflatten(-1, (size // 2, 2))
    return torch.view_as_complex(apart) if number else apart


def _padded(table: Tensor, tokens: int, rotated: str, neutral: float) -> Tensor:
    """A table for all tokens from that of some; ``neutral`` leaves the others as they are."""
    if rotated == "all":
        return table
    rest = table.new_full((tokens - table.shape[0], table.shape[1]), neutral)
    return torch.cat([table, rest] if rotated == "front" else [rest, table])


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """Imported when first called: Triton is not needed to plan."""
    kernel: Callable[..., Any] = getattr(importlib.import_module(f"arachnec.kernels.rowwise.{module}"), name)
    return kernel


KERNELS = {
    "norm_modulate": Kernel(_norm_modulate, ("y",)),
    "gate_residual_norm_modulate": Kernel(_gate_residual_norm_modulate, ("h", "y")),
    "norm_rope": Kernel(_norm_rope, ("y",), constant=("cos", "sin", "freqs_cis")),
    "gate_residual": Kernel(_gate_residual, ("h",)),
    "bias_gelu": Kernel(_bias_gelu, ("y",)),
}
