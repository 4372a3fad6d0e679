"""Where a parameter's gradient is kept: in ``grad``, or rounded beside it.

Autograd adds gradients up in fp32. Where the room for that is lacking, a gradient is rounded into a buffer of low
precision as soon as a backward is done with the parameter: fp32 within a cascade, one rounding for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
