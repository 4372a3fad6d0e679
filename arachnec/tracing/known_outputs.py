"""The outputs of captured blocks, shapes only. In: a captured model. Out: forwards that follow them from the graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from arachnec.tracing.captured import CapturedBlock, CapturedModel, same_value
from arachnec.tracing.record import flatten_call

Forward = Callable[..., Any]
UNBOUNDED = 2**62  # torch's infinity of integers compares greater


def forwards_of_shapes(model: nn.Module, captured: CapturedModel) -> Mapping[nn.Module, Forward]:
    """By block, the forward of its structure on the meta device: what the graph would give, without running it.

    A call of another form than the recorded ones, and the first with other numbers beside its tensors, runs the block
    itself. Left out are blocks that ask more of sizes than what they are, such as a longest caption.
    """
    forwards: dict[nn.Module, Forward] = {}
    for block in captured.blocks:
        if not block.fixed and not block.unbacked and _asks_nothing_more(block):
            instances = [model.get_submodule(path) for path in block.instances]
            forwards |= dict.fromkeys(instances, _forward(_Sizes(block), instances[0], instances[0].forward))
    return forwards


def _asks_nothing_more(captured: CapturedBlock) -> bool:
    """Whether all that the block's own forward asked of sizes follows from what its inputs' dimensions are."""
    values = [node.meta.get("val") for node in captured.exported.graph.nodes]
    environment = next((value.fake_mode.shape_env for value in values if hasattr(value, "fake_mode")), None)
    if environment is None or any(bound.upper < UNBOUNDED for bound in captured.exported.range_constraints.values()):
        return False
    return all(_follows(environment.replace(guard.expr), captured) for guard in environment.guards)


def _follows(asked: Any, captured: CapturedBlock) -> bool:
    if not isinstance(asked, sympy.Eq):
        return bool(asked == sympy.true)
    return bool(sympy.expand((asked.lhs - asked.rhs).subs(captured.symbols)) == 0)


class _Sizes:
    """The sizes of a block's tensors as functions of the symbols that its inputs have alone in some dimension."""

    def __init__(self, captured: CapturedBlock) -> None:
        self.captured = captured
        self.inputs = [node.meta["val"] for node in captured.input_nodes]
        results: Sequence[Any] = captured.exported.graph.output_node().args[0]
        self.results = [node for node in results if isinstance(node, fx.Node)]
        given = [size for dims in captured.input_dims for size in dims]
        returned = [[*captured.dims(node), *self._strides(node)] for node in self.results]
        self.symbols = sorted({size for size in given if size.is_Symbol}, key=str)
        needed = {
            symbol for size in (*given, *(x for sizes in returned for x in sizes)) for symbol in size.free_symbols
        }
        self.is_complete = needed <= set(self.symbols)
        self.input_sizes = sympy.lambdify(self.symbols, given, "math")
        self.result_sizes = sympy.lambdify(self.symbols, returned, "math")

    def _strides(self, node: fx.Node) -> list[sympy.Expr]:
        return [self.captured.expression(stride) for stride in node.meta["val"].stride()]

    def outputs(self, inputs: Sequence[Any]) -> list[Tensor] | None:
        """None for inputs whose sizes do not go together in this graph."""
        dims = self.captured.input_dims
        if not self.is_complete or any(
            not isinstance(tensor, Tensor) or len(sizes) != tensor.dim() or tensor.dtype != value.dtype
            for sizes, tensor, value in zip(dims, inputs, self.inputs, strict=True)
        ):
            return None
        sizes = [int(size) for tensor in inputs for size in tensor.shape]
        at = dict(zip((size for one in dims for size in one), sizes, strict=True))
        values = [at[symbol] for symbol in self.symbols]
        if self.input_sizes(*values) != sizes:
            return None
        places = dict(zip(self.captured.input_nodes, inputs, strict=True))
        return [
            places[node] if node in places else _empty(node, form)
            for node, form in zip(self.results, self.result_sizes(*values), strict=True)
        ]


def _empty(node: fx.Node, sizes: Sequence[int]) -> Tensor:
    rank = len(sizes) // 2
    return torch.empty_strided(sizes[:rank], sizes[rank:], dtype=node.meta["val"].dtype, device="meta")


def _forward(sizes: _Sizes, module: nn.Module, own: Forward) -> Forward:
    captured = sizes.captured
    met: set[tuple[str, ...]] = set()  # numbers beside the tensors, with which the block itself ran

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = flatten_call(module, args, kwargs)
        numbers = _numbers(captured, leaves) if spec == captured.spec and not torch.is_grad_enabled() else None
        if numbers in met:
            outputs = sizes.outputs([leaves[position] for position in captured.input_leaves])
            if outputs is not None:
                return captured.unflatten(outputs)
        result = own(*args, **kwargs)
        if numbers is not None:
            met.add(numbers)
        return result

    return forward


def _numbers(captured: CapturedBlock, leaves: Sequence[Any]) -> tuple[str, ...] | None:
    """What the call has beside its tensors; None where the graph is for another such value."""
    if not all(same_value(leaves[position], value) for position, value, fixed in captured.constants if fixed):
        return None
    return tuple(repr(leaves[position]) for position, _, _ in captured.constants)
