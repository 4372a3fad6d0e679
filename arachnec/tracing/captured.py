"""The result of capture: a graph per block structure, the calls of the blocks, and a graph as a function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from arachnec.ir.diagnostic import UserError
from arachnec.tracing.dims import S, Sizes
from arachnec.tracing.errors import UnequalCall
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
            raise UserError(UnequalCall(None, self.name, str(spec), str(self.spec)))
        for position, value, fixed in self.constants:
            if fixed and not same_value(leaves[position], value):
                raise UserError(UnequalCall(None, self.name, repr(leaves[position]), repr(value)))
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

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Runs of consecutive calls, each given a tensor that the one before returned."""
        runs: list[list[int]] = []
        for index, call in enumerate(self.calls):
            joined = any(origin is not None and origin.call == index - 1 for origin in call.origins)
            if joined and runs:
                runs[-1].append(index)
            else:
                runs.append([index])
        return tuple(map(tuple, runs))


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
