"""Verification of a captured graph: its outputs and gradients must equal eager's at another shape, in another block."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.tracing.captured import CapturedBlock, call_lifted
from arachnec.tracing.errors import not_captured, stack_span
from arachnec.tracing.export import FlatBlock, block_span
from arachnec.tracing.record import HARMLESS, BlockCall, is_meta, training_mode

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

    What is tested is which operation reads what, not rounding, so a wide matrix is a product of two thin ones: a linear
    layer of 5,120 x 13,824 takes 1/470 of its time and memory. Every other operation is given the product itself, so
    that nothing else changes. Numbers of half precision are computed in float32: a processor without instructions for
    bfloat16 takes up to 175 times as long for them.
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


GRADIENT_TOLERANCE = 1e-4  # backward kernels of reordered graphs add in another order


def example_inputs(call: BlockCall, block: nn.Module) -> list[Tensor]:
    """The recorded tensors, or random ones of their shapes and strides where they were on the meta device."""
    device = next((p.device for p in block.parameters()), torch.device("cpu"))
    generator = torch.Generator("cpu").manual_seed(SEED)
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    return [random_like(t, generator).to(device) if t.device.type == "meta" else t.detach().clone() for t in tensors]


def random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor on the CPU of this form: normal values, zeros of integers, a mask of three quarters."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True) if n)
    if like.dtype == torch.bool:
        values = torch.rand(extent, generator=generator) < 0.75
        values[0] = True
    elif like.is_floating_point() or like.is_complex():
        values = torch.randn(extent, generator=generator, dtype=torch.float32).to(like.dtype)
    else:
        values = torch.zeros(extent, dtype=like.dtype)
    return values.as_strided(like.shape, like.stride())


def verify_block(
    captured: CapturedBlock, block: nn.Module, versions: Sequence[BlockCall], *, gradients: bool = True
) -> None:
    """Compare graph and eager on calls of these shapes and strides, and on the last one their ``gradients`` too.

    What is tested is the graph: a block on the meta device or of half precision runs with other weights, wide matrices
    with a low rank, and in float32. One that differs in float32 is compared in its own precision, and that is the
    answer. Raises ``UserError`` where they differ, and where the block fails with values.
    """
    if is_half(block):
        in_float32 = narrow_copy(block, in_float32=True)
        with contextlib.suppress(Exception), InFloat32():
            _verify(captured, in_float32, versions, gradients)
            return
    there = narrow_copy(block, in_float32=False) if is_meta(block) else block
    _verify(captured, there, versions, gradients)


def _verify(captured: CapturedBlock, block: nn.Module, versions: Sequence[BlockCall], gradients: bool) -> None:
    _verify_outputs(captured, block, versions)
    if versions and gradients:
        _verify_gradients(captured, block, versions[-1])


def _verify_gradients(captured: CapturedBlock, block: nn.Module, version: BlockCall) -> None:
    """What a block does to gradients alone, such as ``torch.no_grad()`` around a part of it, no output shows."""
    flat = FlatBlock(block, version.leaves, version.spec)
    with torch.enable_grad(), training_mode(block):
        with _users_block(captured):
            expected = _gradients(captured, block, flat, example_inputs(version, block))
        lifted = partial(call_lifted, captured, block)
        gradients = _gradients(captured, block, lambda *given: lifted(list(given)), example_inputs(version, block))
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)
    for name, value in expected.items():
        off = float((gradients[name].double() - value.double()).abs().max()) if value.numel() else 0.0
        reach = max(float(value.abs().max()) if value.numel() else 0.0, 1e-3 * largest, 1e-30)
        if not off / reach <= max(tolerance(value.dtype), GRADIENT_TOLERANCE):
            of = name.partition(" by ")[0]
            raise not_captured(
                f"the captured graph of {captured.name} has another gradient of {of} than the model: off by "
                f"{off / reach:.1e}",
                help="`torch.no_grad()` inside a block is not captured: call `.detach()` on the tensors that no "
                "gradient should reach",
            )


def _gradients(
    captured: CapturedBlock, block: nn.Module, run: Callable[..., Sequence[Tensor]], inputs: list[Tensor]
) -> dict[str, Tensor]:
    """Of a fixed random projection of all outputs; zeros where nothing follows from a tensor.

    Of a factored matrix those of its two factors, as "name by left": projections of its own.
    """
    wanted: dict[str, Tensor] = {}
    for name, value in block.named_parameters():
        if value.requires_grad and isinstance(value, FactoredMatrix):
            wanted |= {f"{name} by left": value.left, f"{name} by right": value.right}
        elif value.requires_grad:
            wanted[name] = value
    for index, given in enumerate(inputs):
        if captured.input_grads[index]:
            inputs[index] = wanted[f"input {index}"] = given.requires_grad_(True)
    generator = torch.Generator("cpu").manual_seed(SEED)
    total = torch.zeros(())
    for output in run(*inputs):
        if output.requires_grad:
            weights = torch.randn(output.shape, generator=generator).to(output.device)
            total = total.to(output.device) + (output.float() * weights).sum()
    if not total.requires_grad or not wanted:
        return {name: torch.zeros_like(value) for name, value in wanted.items()}
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, gradients, strict=True))


def _verify_outputs(captured: CapturedBlock, block: nn.Module, versions: Sequence[BlockCall]) -> None:
    for version in versions:
        inputs = example_inputs(version, block)
        flat = FlatBlock(block, version.leaves, version.spec)
        with torch.no_grad(), training_mode(block):
            with _users_block(captured):
                expected = flat(*inputs)
            try:
                outputs = call_lifted(captured, block, inputs)
            except Exception as error:
                _refuse_numbers(captured, version)
                raise _refusal(captured, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        if any(not _close(a, b) for a, b in zip(outputs, expected, strict=True)):
            _refuse_numbers(captured, version)
        for index, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            if a.shape != b.shape:
                raise _refusal(captured, f"output {index} is {list(a.shape)}, eager gives {list(b.shape)}")
            difference = _difference(a, b)
            if not difference <= tolerance(b.dtype):
                raise _refusal(captured, f"output {index} is off by {difference:.1e} of its largest value")


@contextlib.contextmanager
def _users_block(captured: CapturedBlock) -> Iterator[None]:
    """What the block's own code raises is its author's to mend."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
        raise user_error(
            f"{captured.name} runs without values, and not with them: {reason}",
            label="here",
            help="check that build()(**sample(clip, generator)[0]) runs in the precision of training; with bf16 "
            "tensors of one dimension, such as timesteps, are not cast, and what the model makes of them it must cast "
            "itself",
            span=block_span(error),
        ) from error


def _refuse_numbers(captured: CapturedBlock, version: BlockCall) -> None:
    """Raises ``UserError`` where the call has another number than the one that is frozen into the graph."""
    for position, value, fixed in captured.constants:
        if not fixed and repr(version.leaves[position]) != repr(value):
            name, other = version.names[position], version.leaves[position]
            raise not_captured(
                f"{captured.name} depends on `{name}`, which is {value!r} in one call and {other!r} in another",
                help=f"a block is captured once for all clips: let it follow `{name}` from the shape of one of its "
                f"tensors, or hand it what it makes of `{name}` as a tensor",
            )


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _difference(a, b) <= tolerance(b.dtype)


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if b.numel() else 0.0


def tolerance(dtype: torch.dtype) -> float:
    """Graph and eager run the same kernels; what is left is the order in which threads add."""
    return 32 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _refusal(captured: CapturedBlock, reason: str) -> UserError:
    output = captured.exported.graph.output_node().args[0]
    node = output[0] if isinstance(output, tuple) else None
    trace = node.meta.get("stack_trace") if isinstance(node, torch.fx.Node) else None
    return not_captured(
        f"the captured graph of {captured.name} differs from the model at another shape or in another block: {reason}",
        label=f"in the block that ends with `{getattr(node, 'target', 'output')}`",
        help="the block must compute its sizes from its inputs' shapes, not keep the numbers of one shape, and keep "
        "what tells it from other blocks of its class in its own attributes",
        span=stack_span(trace),
    )
