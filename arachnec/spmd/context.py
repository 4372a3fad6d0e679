"""The graph under construction: what the rules of the sequence-parallel rewrite read, and how they write.

Every integer in the new graph is a size over all ranks, so ``x / S`` and ``arange(S)`` keep their meaning. A rule that
needs a size on this rank asks for ``Layout.local(context.share)``; only shapes are local.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from arachnec.spmd import runtime as runtime
from arachnec.spmd.layouts import Layout, Part, Size, Value, alike, same

LOCAL = sympy.Symbol("local_tokens", positive=True, integer=True)
"""Tokens on this rank."""

Result: TypeAlias = Value | Sequence["Result"] | fx.Node | None


class MixesTokens(Exception):
    """A rule cannot prove that its op commutes with sharding; the message says what it does to the tokens."""


class Refused(Exception):
    """An op that gathering cannot help either; ``remedy`` says what the user can do."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


@dataclass(frozen=True)
class Event:
    """Something that was done for the op ``node`` of the traced graph; ``bytes`` over all ranks, symbolic."""

    kind: str  # "attention", "gathered", "exchanged"
    node: fx.Node
    reason: str
    bytes: Size


@dataclass
class Context:
    """Builds ``graph`` from a traced one; ``environment`` maps each traced node to its counterpart.

    Where a rule has several ways, ``choices`` says which it takes; ``options`` counts what there was to choose.
    """

    tokens: Size
    substitution: dict[sympy.Symbol, Size]
    graph: fx.Graph = field(default_factory=fx.Graph)
    environment: dict[fx.Node, Any] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    _sizes: dict[Size, fx.Node] = field(default_factory=dict)
    choices: dict[object, int] = field(default_factory=dict)
    options: dict[object, int] = field(default_factory=dict)
    _moved: dict[tuple[fx.Node, int], Value] = field(default_factory=dict)
    _dealt: dict[tuple[fx.Node, int], list[Value]] = field(default_factory=dict)
    _shards: dict[Size, fx.Node] = field(default_factory=dict)
    _here: fx.Node | None = None
    _device: tuple[torch.device, fx.Node] | None = None
    _shard: fx.Node | None = None

    @property
    def shard(self) -> fx.Node:
        assert self._shard is not None
        return self._shard

    def shard_of(self, layout: Layout) -> fx.Node:
        """How the tokens of a layout lie over the ranks: as the cascade's, or in even shares of another length."""
        lengths = [part.length for part in layout.parts if part.sharded]
        if any(not same(length, lengths[0]) for length in lengths):
            raise MixesTokens("joins tensors whose tokens lie differently over the ranks")
        if same(lengths[0], self.tokens):
            return self.shard
        if lengths[0] not in self._shards:
            self._shards[lengths[0]] = self.call(runtime.shard_of_length, self.shard, self.size(lengths[0]))
        return self._shards[lengths[0]]

    def share(self, length: Size) -> Size:
        """How many of ``length`` sharded positions are this rank's."""
        if same(length, self.tokens):
            return LOCAL
        symbol = sympy.Symbol(f"local_{length}", positive=True, integer=True)
        if symbol not in self._sizes:
            node = self.shard_of(Layout((Part(length, sharded=True),)))
            self._sizes[symbol] = self.call(getattr, node, "local")
        return symbol

    def chosen(self, key: object, options: int) -> int:
        """Which of several ways to take; the same for equal keys."""
        self.options[key] = options
        return self.choices.get(key, 0)

    # What the traced graph says

    def expression(self, size: object) -> Size:
        """A size of the traced graph (number, SymInt, or node that yields one) as an expression."""
        if isinstance(size, fx.Node):
            size = size.meta["val"]
        if isinstance(size, torch.SymInt):
            return sympy.expand(size.node.expr.subs(self.substitution))
        if isinstance(size, int):
            return sympy.Integer(size)
        raise MixesTokens(f"takes a size of type {type(size).__name__}")

    def sizes_of(self, tensor: torch.Tensor) -> tuple[Size, ...]:
        return tuple(self.expression(size) for size in tensor.shape)

    def sizes(self, node: fx.Node) -> tuple[Size, ...]:
        """The sizes of a node's only tensor."""
        return self.sizes_of(node.meta["val"])

    def has_tokens(self, size: Size) -> bool:
        return bool(size.has(self.tokens))

    def argument(self, node: fx.Node, name: str, default: Any = None) -> Any:
        """An argument of a traced ATen call by its name in the op's schema."""
        if name in node.kwargs:
            return node.kwargs[name]
        schema = node.target._schema  # type: ignore[union-attr]
        for position, argument in enumerate(schema.arguments):
            if argument.name == name:
                if position < len(node.args):
                    return node.args[position]
                return argument.default_value if argument.has_default_value() else default
        return default

    def value(self, node: object) -> Value:
        """The counterpart of a traced tensor."""
        if not isinstance(node, fx.Node) or not isinstance(self.environment.get(node), Value):
            raise MixesTokens("takes something else than a tensor where a tensor is expected")
        value: Value = self.environment[node]
        return value

    def inputs(self, node: fx.Node) -> list[Value]:
        """The tensors that a traced node reads, in order."""
        values: list[Value] = []

        def collect(item: Any) -> None:
            if isinstance(item, Value):
                values.append(item)
            elif isinstance(item, (list, tuple)):
                for part in item:
                    collect(part)

        fx.node.map_arg((node.args, node.kwargs), lambda n: collect(self.environment.get(n)))
        return values

    # Writing

    def enter(self, node: fx.Node) -> None:
        """Everything written from here on stands for ``node``."""
        self._here = node

    def placeholder(self, name: str, kind: Any = None) -> fx.Node:
        return self.graph.placeholder(name, kind)

    def start(self, shard: fx.Node, token_input: fx.Node, device: torch.device) -> None:
        """The placeholders are all there; sizes can be asked for.

        ``device`` is where the graph was traced; where it says so, the new one says where ``token_input`` is.
        """
        self._shard = shard
        self._device = device, self.call(getattr, token_input, "device")
        self._sizes[self.tokens] = self.call(getattr, shard, "total")
        self._sizes[LOCAL] = self.call(getattr, shard, "local")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target is torch.ops.aten.copy.default:
            target, args, kwargs = runtime.written, args[:2], {}
        args = tuple(self._placed(argument) for argument in args)
        kwargs = {name: self._placed(argument) for name, argument in kwargs.items()}
        node = self.graph.call_function(target, args, kwargs)
        if self._here is not None and "stack_trace" in self._here.meta:
            node.meta["stack_trace"] = self._here.meta["stack_trace"]
        return node

    def _placed(self, argument: Any) -> Any:
        if isinstance(argument, torch.device) and self._device is not None and argument == self._device[0]:
            return self._device[1]
        return argument

    def emit(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], like: Any, layouts: Any) -> Value:
        """Call ``target``; its result is the tensor recorded as ``like``, with these layouts.

        Raises MixesTokens where the layouts do not account for the sizes (a rule that is wrong is not believed), and
        where two dimensions would be sharded: of what is neither in a rank's rows nor in its columns nobody has any.
        """
        sizes = self.sizes_of(like)
        layouts = tuple(layouts)
        if sum(layout is not None for layout in layouts) > 1:
            raise MixesTokens("joins tensors whose tokens lie differently over the ranks")
        if len(layouts) != len(sizes) or any(
            layout is not None and not same(layout.size, size) for layout, size in zip(layouts, sizes, strict=True)
        ):
            raise MixesTokens(f"gives sizes {sizes} that its layout {layouts} does not account for")
        return Value(self.call(target, *args, **kwargs), sizes, layouts, like.element_size())

    def again(self, node: fx.Node, layouts: Any) -> Value:
        """The traced call with the new graph's arguments; its result has these layouts."""
        args, kwargs = self.mapped(node.args), self.mapped(node.kwargs)
        return self.emit(node.target, args, kwargs, node.meta["val"], layouts)

    def size(self, size: Size | int) -> fx.Node | int:
        """A node (or number) that holds ``size`` at run time."""
        size = sympy.expand(sympy.sympify(size))
        if isinstance(size, sympy.Integer):
            return int(size)
        if size in self._sizes:
            return self._sizes[size]
        if isinstance(size, (sympy.Add, sympy.Mul)):
            function = operator.add if isinstance(size, sympy.Add) else operator.mul
            terms = [self.size(term) for term in size.args]
            node: Any = terms[0]
            for term in terms[1:]:
                node = self.call(function, node, term)
        elif isinstance(size, sympy.Pow) and isinstance(size.exp, sympy.Integer) and size.exp > 0:
            node = self.call(operator.pow, self.size(size.base), int(size.exp))
        else:
            raise MixesTokens(f"needs the size {size}, which no input gives")
        self._sizes[size] = node
        return node  # type: ignore[no-any-return]

    def define_size(self, size: Size, node: fx.Node) -> None:
        self._sizes.setdefault(size, node)

    def knows_size(self, size: Size) -> bool:
        return size in self._sizes

    def local_sizes(self, sizes: Sequence[Size], layouts: Sequence[Layout | None]) -> list[fx.Node | int]:
        """A shape on this rank."""
        return [
            self.size(size if layout is None else layout.local(self.share))
            for size, layout in zip(sizes, layouts, strict=True)
        ]

    def number(self, node: fx.Node) -> Any:
        """The counterpart of a traced integer, or of a float made of sizes: its value over all ranks."""
        if node in self.environment:
            return self.environment[node]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            expression = self.expression(value)
            try:
                self.environment[node] = self.size(expression)
                return self.environment[node]
            except MixesTokens:
                pass
        replaced = {
            operand: self.whole(read).node
            for operand in node.all_input_nodes
            if isinstance(read := self.environment.get(operand), Value) and read.sharded
        }
        args, kwargs = self.mapped(node.args, replaced), self.mapped(node.kwargs, replaced)
        self.environment[node] = new = self.call(node.target, *args, **kwargs)
        if isinstance(value, torch.SymInt) and isinstance(expression, sympy.Symbol):
            self.define_size(expression, new)
        return new

    def mapped(self, arguments: Any, replaced: dict[fx.Node, fx.Node] | None = None) -> Any:
        """Arguments of a traced call as arguments of the new one; ``replaced`` overrides what stands for a tensor."""

        def new(node: fx.Node) -> Any:
            if replaced is not None and node in replaced:
                return replaced[node]
            value = self.environment[node] if node in self.environment else self.number(node)
            return value.node if isinstance(value, Value) else value

        return fx.node.map_arg(arguments, new)

    def parts(self, layout: Layout) -> tuple[fx.Node | int | None, ...]:
        """A layout's parts as the kernels take them."""
        return tuple(None if part.sharded else self.size(part.length) for part in layout.parts)

    # Moving between the ranks' own tokens and all of them

    def sharded(self, value: Value, dim: int, layout: Layout) -> Value:
        """``value``, which is the same on every rank along ``dim``, with this rank's positions of it."""
        if value.layouts[dim] is not None or not same(value.sizes[dim], layout.size):
            raise MixesTokens(f"meets tokens in a dimension of size {value.sizes[dim]}")
        return self._move(runtime.shard_parts, value, dim, layout, layout)

    def gathered(self, value: Value, dim: int) -> Value:
        """``value`` with all positions along ``dim`` on every rank."""
        layout = value.layouts[dim]
        if layout is None:
            return value
        return self._move(runtime.gather_parts, value, dim, layout, None)

    def whole(self, value: Value) -> Value:
        for dim in range(len(value.sizes)):
            value = self.gathered(value, dim)
        return value

    def _move(self, function: Any, value: Value, dim: int, layout: Layout, after: Layout | None) -> Value:
        earlier = self._moved.get((value.node, dim))
        if earlier is not None:
            layout_before = earlier.layouts[dim]
            if layout_before is None or (after is not None and alike(layout_before, after)):
                return earlier
        merged = (self.size(layout.outer), self.size(layout.inner)) if layout.merged else ()
        node = self.call(function, value.node, dim, self.shard_of(layout), self.parts(layout), *merged)
        layouts = (*value.layouts[:dim], after, *value.layouts[dim + 1 :])
        moved = Value(node, value.sizes, layouts, value.itemsize)
        self._moved[value.node, dim] = moved
        self._moved[node, dim] = value
        return moved

    def redistributed(self, value: Value, dim: int, after: Layout, reason: str) -> Value:
        """``value`` with its tokens along ``dim`` dealt out as ``after`` says, by one all-to-all."""
        before = value.layouts[dim]
        if before is None or alike(before, after):
            return value
        if not (before.alone and after.alone and same(before.size, after.size)):
            raise MixesTokens("joins tensors whose tokens lie differently over the ranks")
        earlier = self._dealt.setdefault((value.node, dim), [value])
        for known in earlier:
            if alike(known.layouts[dim], after):  # type: ignore[arg-type]
                return known
        sizes = [(self.size(x.outer), self.size(x.parts[0].length), self.size(x.inner)) for x in (before, after)]
        node = self.call(runtime.redistribute, value.node, dim, self.shard, *sizes)
        layouts = (*value.layouts[:dim], after, *value.layouts[dim + 1 :])
        dealt = Value(node, value.sizes, layouts, value.itemsize)
        earlier.append(dealt)
        self._dealt[node, dim] = earlier
        self.record("exchanged", reason, value.bytes)
        return dealt

    # What most rules need

    def align(self, values: Sequence[Value], rank: int, sizes: Sequence[Size]) -> tuple[Layout | None, ...]:
        """The layouts of a broadcast result of ``rank`` dimensions.

        Tokens that are dealt out in two ways meet in the cascade's own, else in the first. Raises MixesTokens where two
        operands lie differently over the ranks and cannot be exchanged.
        """
        layouts: list[Layout | None] = [None] * rank
        for value in values:
            for dim, layout in enumerate(value.layouts, start=rank - len(value.layouts)):
                if layout is None:
                    continue
                other = layouts[dim]
                layouts[dim] = layout if other is None or alike(other, layout) else self._common(other, layout)
        return tuple(layouts)

    def _common(self, a: Layout, b: Layout) -> Layout:
        if not (a.alone and b.alone and same(a.size, b.size)):
            raise MixesTokens("joins tensors whose tokens lie differently over the ranks")
        return b if same(b.parts[0].length, self.tokens) else a

    def aligned(self, value: Value, layouts: Sequence[Layout | None], skip: int | None = None) -> Value:
        """An operand of a broadcast op, sliced where it is whole and the result is not, and dealt out as the result."""
        shift = len(layouts) - len(value.sizes)
        for dim in range(len(value.sizes)):
            layout = layouts[dim + shift]
            if layout is None or dim + shift == skip or same(value.sizes[dim], sympy.S.One):
                continue
            if value.layouts[dim] is None:
                value = self.sharded(value, dim, layout)
            else:
                value = self.redistributed(value, dim, layout, "joins tokens that are dealt out in two ways")
        return value

    def copy(self, node: fx.Node, replaced: dict[fx.Node, fx.Node] | None = None) -> Result:
        """The traced call as it is; no tensor it reads may be sharded."""
        new = self.call(node.target, *self.mapped(node.args, replaced), **self.mapped(node.kwargs, replaced))
        return self.unsharded(node.meta.get("val"), new)

    def unsharded(self, like: Any, new: fx.Node) -> Result:
        """``new`` gives what was recorded as ``like``, the same on every rank."""
        if isinstance(like, torch.Tensor):
            sizes = self.sizes_of(like)
            for dim, size in enumerate(sizes):
                if isinstance(size, sympy.Symbol) and not self.knows_size(size):  # its values decide it
                    self.define_size(size, self.call(torch.ops.aten.sym_size.int, new, dim))
            return Value(new, sizes, (None,) * like.ndim, like.element_size())
        if isinstance(like, (list, tuple)):
            return [self.unsharded(item, self.call(operator.getitem, new, i)) for i, item in enumerate(like)]
        return new

    def record(self, kind: str, reason: str, size: Size) -> None:
        assert self._here is not None
        self.events.append(Event(kind, self._here, reason, sympy.expand(size)))
