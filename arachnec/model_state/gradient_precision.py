"""In what precision autograd keeps the gradients of low-precision parameters: as the plan has counted them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from arachnec.ir.nodes import Module, Stage
from arachnec.ir.stage_sizes import element_bytes, gradient_element_bytes, gradient_precision
from arachnec.model_state.kept_gradients import keep_rounded

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
