"""Tensors as the row kernels read them: rows [N, H], dense along the last dimension."""

from __future__ import annotations

from typing import overload

from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """x [..., H] as rows [N, H] whose last stride is 1; a view where possible."""
    return dense(x.reshape(-1, x.shape[-1]))


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: None) -> None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """x with a last stride of 1; copied only where it has another."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()
