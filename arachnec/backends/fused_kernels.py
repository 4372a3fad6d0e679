"""What a fused region calls for each kernel that was matched: the kernel's own function, or a few views around it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def _norm_rope(x: Tensor, cos: Tensor, sin: Tensor, heads: int, size: int, **how: Any) -> Any:
    """``x`` is [B, S, heads, size] or with the last two in one; the result has its pairs apart, [..., size / 2, 2]."""
    batch, tokens = x.shape[:2]
    tables = {"cos": cos.reshape(tokens, size // 2), "sin": sin.reshape(tokens, size // 2)}
    turned = _kernel("norm_rope", "norm_rope")(x.reshape(batch, tokens, heads, size), **tables, **how)
    return turned.reshape(batch, tokens, heads, size // 2, 2)


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """Imported when first called: Triton is not needed to plan."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"arachnec.kernels.{module}"), name)
    return found


KERNELS = {
    "norm_modulate": Kernel(_norm_modulate, ("y",)),
    "gate_residual_norm_modulate": Kernel(_gate_residual_norm_modulate, ("h", "y")),
    "norm_rope": Kernel(_norm_rope, ("y",), constant=("cos", "sin")),
    "bias_gelu": Kernel(_bias_gelu, ("y",)),
}
