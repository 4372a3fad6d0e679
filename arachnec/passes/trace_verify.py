"""A captured graph is not believed before it has given eager's numbers at another shape."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError
from arachnec.passes.trace_captured import CapturedBlock, call_lifted
from arachnec.passes.trace_errors import NotPolymorphic, NumberMatters, stack_span
from arachnec.passes.trace_export import FlatBlock
from arachnec.passes.trace_record import BlockCall, training_mode

SEED = 2605
TILE = 1 << 20


def materialised(block: nn.Module) -> nn.Module:
    """A copy on the CPU of a block on the meta device, with small uniform values in place of weights nobody has."""
    generator = torch.Generator("cpu").manual_seed(SEED)
    tile = torch.empty(TILE).uniform_(-0.05, 0.05, generator=generator)
    real = copy.deepcopy(block).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*real.parameters(), *real.buffers()]:
            flat = tensor.view(-1)
            for start in range(0, flat.numel(), TILE):
                part = flat[start : start + TILE]
                part.copy_(tile[: part.numel()])
    return real


def example_inputs(call: BlockCall, block: nn.Module) -> list[Tensor]:
    """The recorded tensors, or random ones of their shapes and strides where they were on the meta device."""
    device = next((p.device for p in block.parameters()), torch.device("cpu"))
    generator = torch.Generator("cpu").manual_seed(SEED)
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
    return [_random(t, generator).to(device) if t.device.type == "meta" else t.detach().clone() for t in tensors]


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    extent = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, like.stride(), strict=True) if n)
    if like.dtype == torch.bool:
        values = torch.rand(extent, generator=generator) < 0.75
        values[0] = True
    elif like.is_floating_point() or like.is_complex():
        values = torch.randn(extent, generator=generator, dtype=torch.float32).to(like.dtype)
    else:
        values = torch.zeros(extent, dtype=like.dtype)
    return values.as_strided(like.shape, like.stride())


def verify_block(captured: CapturedBlock, block: nn.Module, versions: Sequence[BlockCall]) -> None:
    """Compare graph and eager on calls of these shapes and strides. Raises ``UserError`` where they differ."""
    for version in versions:
        inputs = example_inputs(version, block)
        flat = FlatBlock(block, version.leaves, version.spec)
        with torch.no_grad(), training_mode(block):
            expected = flat(*inputs)
            try:
                found = call_lifted(captured, block, inputs)
            except Exception as error:
                _refuse_numbers(captured, version)
                raise UserError(_refuse(captured, f"{type(error).__name__}: {str(error).splitlines()[0]}")) from error
        if any(not _close(a, b) for a, b in zip(found, expected, strict=True)):
            _refuse_numbers(captured, version)
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            if a.shape != b.shape:
                raise UserError(_refuse(captured, f"output {index} is {list(a.shape)}, eager gives {list(b.shape)}"))
            difference = _difference(a, b)
            if not difference <= tolerance(b.dtype):
                raise UserError(_refuse(captured, f"output {index} is off by {difference:.1e} of its largest value"))


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
