"""Verification of a captured graph: its outputs and gradients must equal eager's at another shape, in another block."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError
from arachnec.tracing.captured import CapturedBlock, call_lifted
from arachnec.tracing.errors import BlockFails, GradientDiffers, NotPolymorphic, NumberMatters, stack_span
from arachnec.tracing.export import FlatBlock, block_span
from arachnec.tracing.record import BlockCall, training_mode

SEED = 2605
TILE = 1 << 20
LARGEST = 1 << 24
GRADIENT_TOLERANCE = 1e-4  # backward kernels of reordered graphs add in another order


def materialised(block: nn.Module) -> nn.Module:
    """A copy on the CPU of a block on the meta device, with small uniform values in place of weights nobody has."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    tile = torch.empty(TILE).uniform_(-0.05, 0.05, generator=generator)
    computed = [value for module in block.modules() for value in vars(module).values() if _is_computed(value)]
    real = copy.deepcopy(block, {id(value): value.detach() for value in computed}).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*real.parameters(), *real.buffers()]:
            fill(tensor, tile)
    return real


def _is_computed(value: object) -> bool:
    """What weight_norm, say, leaves in a module: torch copies none that follow from another."""
    return isinstance(value, Tensor) and value.grad_fn is not None


def fill(tensor: Tensor, tile: Tensor) -> None:
    """Write ``tile`` over a contiguous tensor, again and again: drawing as many numbers would take longer."""
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), TILE):
        part = flat[start : start + TILE]
        part.copy_(tile[: part.numel()])


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

    Raises ``UserError`` where they differ, and where the block fails with values.
    """
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
            raise UserError(GradientDiffers(None, captured.name, name, f"{off / reach:.1e}"))


def _gradients(
    captured: CapturedBlock, block: nn.Module, run: Callable[..., Sequence[Tensor]], inputs: list[Tensor]
) -> dict[str, Tensor]:
    """Of a fixed random projection of all outputs; zeros where nothing follows from a tensor.

    The largest weights of the largest models are left out, for the memory of two gradients: their biases and what flows
    through them to the inputs stand for them.
    """
    wanted: dict[str, Tensor] = {
        name: value for name, value in block.named_parameters() if value.requires_grad and value.numel() <= LARGEST
    }
    for index, value in enumerate(inputs):
        if captured.input_grads[index]:
            wanted[f"input {index}"] = value.requires_grad_(True)
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
                raise UserError(_refuse(captured, f"{type(error).__name__}: {str(error).splitlines()[0]}")) from error
        if any(not _close(a, b) for a, b in zip(outputs, expected, strict=True)):
            _refuse_numbers(captured, version)
        for index, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            if a.shape != b.shape:
                raise UserError(_refuse(captured, f"output {index} is {list(a.shape)}, eager gives {list(b.shape)}"))
            difference = _difference(a, b)
            if not difference <= tolerance(b.dtype):
                raise UserError(_refuse(captured, f"output {index} is off by {difference:.1e} of its largest value"))


@contextlib.contextmanager
def _users_block(captured: CapturedBlock) -> Iterator[None]:
    """What the block's own code raises is its author's to mend."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}".rstrip(": ")
        raise UserError(BlockFails(block_span(error), captured.name, reason)) from error


def _refuse_numbers(captured: CapturedBlock, version: BlockCall) -> None:
    """Raises ``UserError`` where the call has another number than the one that is frozen into the graph."""
    for position, value, fixed in captured.constants:
        if not fixed and repr(version.leaves[position]) != repr(value):
            first, second = repr(value), repr(version.leaves[position])
            raise UserError(NumberMatters(None, captured.name, version.names[position], first, second))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and _difference(a, b) <= tolerance(b.dtype)


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) if b.numel() else 0.0


def tolerance(dtype: torch.dtype) -> float:
    """Graph and eager run the same kernels; what is left is the order in which threads add."""
    return 32 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _refuse(captured: CapturedBlock, reason: str) -> NotPolymorphic:
    output = captured.exported.graph.output_node().args[0]
    node = output[0] if isinstance(output, tuple) else None
    trace = node.meta.get("stack_trace") if isinstance(node, torch.fx.Node) else None
    return NotPolymorphic(stack_span(trace), captured.name, str(getattr(node, "target", "output")), reason)
