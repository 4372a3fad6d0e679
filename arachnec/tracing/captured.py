"""The result of capture: a graph per block structure, the calls of the blocks, and a graph as a function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arachnec.tracing.dims import S, Sizes
from arachnec.tracing.errors import unequal_call_error
from arachnec.tracing.record import flatten_call

Dims = tuple[sympy.Expr, ...]


@dataclass(frozen=True)
class Slot:
    """Where one placeholder of the graph comes from: ``kind`` is parameter, buffer, constant or input."""

    kind: str
    target: str | int


@dataclass(frozen=True, eq=False)
class CapturedBlock:
    """The graph of every block of one structure.

    ``symbols`` maps the graph's own sympy symbols to expressions of ``tracing.dims.B``, ``S`` and ``T`` (or of ``N0``,
    ``N1``, ... for sizes that are no combination of them); ``dims(node)`` is a node's shape in those. ``input_dims``
    and ``output_dims`` are the shapes of tensor inputs and outputs in placeholder order. ``constants`` are the calls'
    other arguments: leaf index, value, and whether every recording had that value (if not, the graph was verified not
    to depend on it).
    """

    name: str
    exported: ExportedProgram
    instances: tuple[str, ...]
    slots: tuple[Slot, ...]
    input_names: tuple[str, ...]
    input_dims: tuple[Dims, ...]
    input_leaves: tuple[int, ...]
    input_grads: tuple[bool, ...]  # whether the loss depends on trained parameters through it
    output_dims: tuple[Dims, ...]
    output_leaves: tuple[int, ...]
    constants: tuple[tuple[int, Any, bool], ...]
    output_constants: tuple[tuple[int, Any], ...]
    spec: pytree.TreeSpec
    output_spec: pytree.TreeSpec
    symbols: dict[sympy.Symbol, sympy.Expr]
    examples: tuple[dict[sympy.Symbol, int], ...]  # the sizes of each recording: B, S, T, N0, ...
    fixed: Mapping[sympy.Symbol, int] = field(default_factory=dict)  # S and T, where the graph is for one clip shape
    unbacked: frozenset[sympy.Symbol] = frozenset()  # of ``symbols``: a size that values decide, as its upper bound

    @property
    def graph_module(self) -> fx.GraphModule:
        module: fx.GraphModule = self.exported.graph_module
        return module

    @property
    def input_nodes(self) -> tuple[fx.Node, ...]:
        """The placeholders of the tensor inputs."""
        nodes = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        return tuple(node for node, slot in zip(nodes, self.slots, strict=True) if slot.kind == "input")

    def expression(self, size: int | torch.SymInt) -> sympy.Expr:
        """One size of the graph in B, S and T."""
        if isinstance(size, torch.SymInt):
            return sympy.sympify(size.node.expr).subs(self.symbols)
        return sympy.Integer(size)

    def dims(self, node: fx.Node) -> Dims:
        """The shape of a node's value; () for a node whose value is a number."""
        value = node.meta.get("val")
        return tuple(self.expression(size) for size in value.shape) if isinstance(value, Tensor) else ()

    def flatten(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The tensor inputs of a call. Raises ``UserError`` if the call has another form than the recorded ones."""
        leaves, spec = flatten_call(block, args, kwargs)
        if spec != self.spec:
            raise unequal_call_error(self.name, spec, self.spec)
        for position, value, fixed in self.constants:
            if fixed and not same_value(leaves[position], value):
                raise unequal_call_error(self.name, repr(leaves[position]), repr(value))
        return tuple(leaves[position] for position in self.input_leaves)

    def unflatten(self, outputs: Sequence[Tensor]) -> Any:
        """What the block's forward returns, from its tensor outputs."""
        leaves: list[Any] = [None] * (len(self.output_leaves) + len(self.output_constants))
        for position, tensor in zip(self.output_leaves, outputs, strict=True):
            leaves[position] = tensor
        for position, value in self.output_constants:
            leaves[position] = value
        return pytree.tree_unflatten(leaves, self.output_spec)


@dataclass(frozen=True)
class TokenPlace:
    """Where S is read: a dimension of one leaf of the first call that has tokens.

    Blocks over frames and blocks over places have the tokens in several dimensions, of which one is S in their graphs;
    ``all`` are those that move with the clip or with the batch.
    """

    path: str
    leaf: int
    dim: int
    all: tuple[int, ...] = ()
    batched: bool = False  # the number of clips is a factor of what lies in ``all``

    def read(self, leaves: Sequence[Any]) -> int:
        return int(leaves[self.leaf].shape[self.dim])

    def count(self, leaves: Sequence[Any], batch: int) -> int:
        """The tokens of one clip, whatever the block's rank."""
        shape = leaves[self.leaf].shape
        together = math.prod(int(shape[dim]) for dim in self.all or (self.dim,))
        return together // batch if self.batched else together


@dataclass(frozen=True)
class Origin:
    """An input that is the very tensor an earlier call returned: ``calls[call]``'s tensor output number ``output``."""

    call: int
    output: int


@dataclass(frozen=True)
class CapturedCall:
    """One call of one block. ``origins`` has an entry per tensor input, None where the shell made it."""

    path: str
    block: int
    origins: tuple[Origin | None, ...]


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """``calls`` in the order of the forward; ``blocks`` are the structures they are calls of.

    An ``Origin`` is only there when nothing outside the blocks reads that tensor, so both ends may keep it as a shard.
    ``escapes`` are the outputs that are read outside, ``handed`` those of which another block takes a view. ``tokens``
    are all those of a clip at the first recording. Without ``blocks`` nothing is known of the calls but their order.
    """

    blocks: tuple[CapturedBlock, ...]
    calls: tuple[CapturedCall, ...]
    escapes: frozenset[Origin]
    sizes: tuple[Sizes, ...]
    tokens_at: TokenPlace
    handed: frozenset[Origin] = frozenset()
    tokens: int = 0

    @property
    def folded(self) -> bool:
        """Whether S is not all tokens of a clip, which lie in several dimensions."""
        return self.tokens != self.sizes[0].tokens

    def block_of(self, path: str) -> CapturedBlock:
        return next(block for block in self.blocks if path in block.instances)


def lifted(
    captured: CapturedBlock, block: nn.Module, graph_module: fx.GraphModule | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """The graph as a function of the tensor inputs, bound to this instance's parameters and buffers.

    ``graph_module`` is another form of the same graph, with the same placeholders.
    """
    values: list[Tensor | None] = []
    for slot in captured.slots:
        if slot.kind == "parameter":
            values.append(block.get_parameter(str(slot.target)))
        elif slot.kind == "buffer":
            values.append(block.get_buffer(str(slot.target)))
        elif slot.kind == "constant":
            constant = captured.exported.constants[str(slot.target)]
            device = next((parameter.device for parameter in block.parameters()), constant.device)
            values.append(constant if constant.ndim == 0 else constant.to(device))
        else:
            values.append(None)
    positions = [i for i, slot in enumerate(captured.slots) if slot.kind == "input"]
    module = captured.graph_module if graph_module is None else graph_module

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        arguments = list(values)
        for position, tensor in zip(positions, inputs, strict=True):
            arguments[position] = tensor
        return tuple(module(*arguments))

    return run


def call_lifted(captured: CapturedBlock, block: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the captured graph on ``inputs`` with the parameters and buffers of ``block``."""
    return lifted(captured, block)(*inputs)


def same_value(a: Any, b: Any) -> bool:
    """Equality of two arguments that are no tensors."""
    try:
        return bool(type(a) is type(b) and a == b)
    except (TypeError, ValueError, RuntimeError):
        return a is b


def chained_inputs(captured: CapturedModel, block: int) -> list[bool]:
    """Which inputs of a block class come from another block in most of its calls."""
    calls = [call for call in captured.calls if call.block == block]
    inputs = range(len(captured.blocks[block].input_names))
    linked = [any(call.origins[i] is not None for call in calls) for i in inputs]
    # A model of one block: what it is chained by cannot be seen, but its first input with tokens is made for it alone.
    if not any(linked):
        linked = [S in sum(map(sympy.sympify, captured.blocks[block].input_dims[i])).free_symbols for i in inputs]
    return linked


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
