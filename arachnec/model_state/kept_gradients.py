"""Where a parameter's gradient is kept, and in what precision: in ``grad``, or rounded beside it.

Autograd adds gradients up in fp32. Where the room for that is lacking, a gradient is rounded into a buffer of low
precision as soon as a backward is done with the parameter: fp32 within a cascade, one rounding for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from arachnec.ir.nodes import Module, Stage
from arachnec.ir.stage_sizes import element_bytes, gradient_element_bytes, gradient_precision

BUFFER, DTYPE = "rounded_grad", "rounded_grad_dtype"  # attributes of a parameter


def gradient_of(value: Tensor) -> Tensor | None:
    """A parameter's gradient as it stands; None where nothing used the parameter."""
    return value.grad if value.grad is not None else getattr(value, BUFFER, None)


def set_gradient(value: Tensor, gradient: Tensor | None) -> None:
    """Put a gradient of ``gradient_dtype`` in the place of the one there is, or drop that."""
    rounded = gradient is not None and getattr(value, DTYPE, None) is not None
    value.grad = None if rounded else gradient
    setattr(value, BUFFER, gradient if rounded else None)


def gradient_dtype(value: Tensor) -> torch.dtype:
    """The precision in which a parameter's gradient is kept from one cascade to the next."""
    return getattr(value, DTYPE, None) or getattr(value, "grad_dtype", None) or value.dtype


def keep_rounded(value: Tensor, dtype: torch.dtype | None) -> None:
    """Keep the parameter's gradient in ``dtype`` between backwards, None: as autograd adds it up.

    To be called while there is no gradient.
    """
    if not hasattr(value, DTYPE):
        value.register_post_accumulate_grad_hook(_round)  # type: ignore[no-untyped-call]
    setattr(value, DTYPE, dtype)


@torch.no_grad()
def _round(value: Tensor) -> None:
    dtype: torch.dtype | None = getattr(value, DTYPE, None)
    if dtype is None or value.grad is None:
        return
    buffer: Tensor | None = getattr(value, BUFFER, None)
    setattr(value, BUFFER, value.grad.to(dtype) if buffer is None else buffer.add_(value.grad))
    value.grad = None


def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of every parameter's gradient; zeros where nothing used the parameter."""
    return {
        name: (torch.zeros_like(value) if (gradient := gradient_of(value)) is None else gradient).detach().clone()
        for name, value in parameters.items()
    }


def drop_gradients(parameters: Mapping[str, Tensor]) -> None:
    for value in parameters.values():
        set_gradient(value, None)


LOW = 4  # bytes, below which a precision is low


def keep_gradients(parameters: Mapping[str, Tensor], module: Module) -> None:
    """Have autograd add gradients up in fp32, and keep them so, or rounded to the parameters' own precision between two
    backwards where the plan says so.

    To be called while there are no gradients. Before torch 2.12 a gradient has its parameter's precision, always.
    """
    exact = not any(gradient_element_bytes(stage) < LOW for stage in _trained(module))
    for value in parameters.values():
        if value.dtype.itemsize < LOW and hasattr(value, "grad_dtype"):
            value.grad_dtype = torch.float32
            keep_rounded(value, None if exact else value.dtype)


def says_low(module: Module, parameters: Mapping[str, Tensor]) -> str | None:
    """What a person should know of gradients that are not kept in fp32; None where they are."""
    low = next((value for value in parameters.values() if value.dtype.itemsize < LOW), None)
    if low is None:
        return None
    if not hasattr(low, "grad_dtype"):
        return f"gradients are kept in {_name(low.dtype)}: torch {torch.__version__} cannot keep them in fp32"
    for stage in _trained(module):
        if gradient_element_bytes(stage) < LOW <= 2 * element_bytes(stage):
            return (
                f"gradients are kept in {gradient_precision(stage)}, and added up in fp32 within a cascade and over "
                "ranks: kept in fp32 they would take the room that the longest clips need"
            )
    return None


def _trained(module: Module) -> list[Stage]:
    return [stage for stage in module.stages if stage.trained]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
