"""Values for blocks that are run on the host to test a graph: wide matrices have a low rank, and all is in float32.

What is tested is which operation reads what, not rounding, so a wide matrix is a product of two thin ones: a linear
layer of 5,120 x 13,824 takes 1/470 of its time and memory. Every other operation is given the product itself, so that
nothing else changes. Numbers of half precision are computed in float32: a processor without instructions for bfloat16
takes up to 175 times as long for them.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from arachnec.tracing.record import HARMLESS

SEED = 2605
TILE = 1 << 20
WIDE = 1 << 20  # elements of a matrix that becomes a product
RANK = 8
HALVES = (torch.bfloat16, torch.float16)
LINEAR = (F.linear, torch.ops.aten.linear.default)
FORM = HARMLESS | {Tensor.stride}
TO_HALF = (Tensor.bfloat16, Tensor.half)


class FactoredMatrix(nn.Parameter):
    """A parameter [n, m] that is ``left`` [n, RANK] times ``right`` [RANK, m], which have the gradients."""

    left: Tensor
    right: Tensor

    @classmethod
    def like(
        cls, matrix: Tensor, dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> FactoredMatrix:
        """Random, of a size that keeps a signal's."""
        rows, columns = matrix.shape
        shown = torch.zeros((), dtype=dtype, device=device).expand(rows, columns)
        factored: FactoredMatrix = torch.Tensor._make_subclass(cls, shown, matrix.requires_grad)
        for name, shape, fan in (("left", (rows, RANK), RANK), ("right", (RANK, columns), columns)):
            bound = math.sqrt(3 / fan)
            values = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            setattr(factored, name, values.to(device, dtype).requires_grad_(matrix.requires_grad))
        return factored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in LINEAR and len(args) > 1 and isinstance(args[1], cls):
            given, weight, *bias = args
            return func(F.linear(given, weight.right), weight.left, *bias, **kwargs)
        args, kwargs = pytree.tree_map_only(cls, lambda matrix: matrix.left @ matrix.right, (args, kwargs))
        return func(*args, **kwargs)


class InFloat32(TorchFunctionMode):
    """Inside, what would compute in half precision computes in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORM:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(_in_float32, (args, kwargs or {}))
        if isinstance(func, HigherOrderOperator):  # runs a part of the graph, where no mode would be active
            args = pytree.tree_map_only(nn.Module, _InFloat32, args)
        return (Tensor.float if func in TO_HALF else func)(*args, **kwargs)


class _InFloat32(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any) -> Any:
        with InFloat32():
            return self.part(*args)


def _in_float32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value


def is_half(block: nn.Module) -> bool:
    return any(tensor.dtype in HALVES for tensor in [*block.parameters(), *block.buffers()])


def unfilled(block: nn.Module) -> nn.Module:
    """A copy on the CPU of a block on the meta device, for export, which reads no value: the system gives memory to
    what is written."""
    return copy.deepcopy(block, _computed(block)).to_empty(device="cpu")


def narrow_copy(block: nn.Module, *, in_float32: bool) -> nn.Module:
    """A copy with small uniform values for parameters, and for buffers on the meta device; wide matrices factored.

    On the CPU where the block is on the meta device. ``in_float32``: what is of half precision becomes float32.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)
    tile = torch.empty(TILE).uniform_(-0.05, 0.05, generator=generator)

    def narrow(tensor: Tensor) -> Tensor:
        dtype = torch.float32 if in_float32 and tensor.dtype in HALVES else tensor.dtype
        parameter = isinstance(tensor, nn.Parameter)
        if parameter and is_wide(tensor):
            return FactoredMatrix.like(tensor, dtype, _device(tensor), generator)
        if not tensor.is_meta and not (type(tensor) is nn.Parameter and dtype.is_floating_point):
            return tensor.detach().to(dtype, copy=True)  # a buffer's values, and what has a form of its own
        filled = torch.empty_like(tensor, dtype=dtype, device=_device(tensor), memory_format=torch.contiguous_format)
        with torch.no_grad():
            fill(filled, tile)
        return nn.Parameter(filled, requires_grad=tensor.requires_grad) if parameter else filled

    known = {id(tensor): narrow(tensor) for tensor in [*block.parameters(), *block.buffers()]}
    return copy.deepcopy(block, _computed(block) | known)


def is_wide(parameter: Tensor) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.ndim == 2
        and parameter.is_floating_point()
        and parameter.numel() > WIDE
    )


def _computed(block: nn.Module) -> dict[int, Any]:
    """What weight_norm, say, leaves in a module: torch copies none that follow from another."""
    held = (value for module in block.modules() for value in vars(module).values())
    return {id(x): x.detach() for x in held if isinstance(x, Tensor) and x.grad_fn is not None}


def _device(like: Tensor) -> torch.device:
    return torch.device("cpu") if like.is_meta else like.device


def fill(tensor: Tensor, tile: Tensor) -> None:
    """Write ``tile`` over a contiguous tensor, again and again: drawing as many numbers would take longer."""
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), TILE):
        part = flat[start : start + TILE]
        part.copy_(tile[: part.numel()])
