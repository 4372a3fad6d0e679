"""The sequence-parallel rewrite: a block's graph becomes the graph of one rank's share of it, or a reason why not.

An abstract interpretation (Cousot and Cousot, POPL 1977) whose domain says, for every dimension of every tensor, which
of its positions a rank holds (``tracing.sequence_labels``), and whose transfer functions are rules, one per op
(``tracing.sequence_rules``). A rule that cannot prove that its op commutes with taking a rank's tokens has the op's
operands gathered, and the op runs in full on every rank: always right, and reported with what it costs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Span
from arachnec.spmd.context import Context, MixesTokens, Refused, Result
from arachnec.spmd.layouts import Layout, Part, Size, Value, same
from arachnec.spmd.rules import RULES, Rule, rule_for
from arachnec.spmd.shape_rules import operands
from arachnec.tracing.blocks import CapturedBlock, CapturedModel
from arachnec.tracing.dims import S
from arachnec.tracing.errors import stack_span

LENGTH = sympy.Symbol("L", positive=True, integer=True)
"""The length of what is sharded, where that is not S but, say, S + T: a block whose shell joined text and video."""


@dataclass(frozen=True)
class CannotShard(Diagnostic):
    title: ClassVar[str] = "{block} cannot run on a part of its tokens: `{op}`: {reason}"
    label: ClassVar[str] = "this operation"
    help: ClassVar[str] = "{remedy}"
    block: str
    op: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class NoShardedInput(Diagnostic):
    title: ClassVar[str] = "no input of {block} has the video's tokens as a dimension of their own"
    help: ClassVar[str] = "pass the tokens to the block as [batch, tokens, hidden]; its inputs are {inputs}"
    block: str
    inputs: str


@dataclass(frozen=True)
class Note:
    """An op that moves tokens between ranks: where it stands, why, and the bytes of the tensors it concerns.

    ``bytes`` counts whole tensors, over all ranks, in one forward of one block, as an expression of B, S and T.
    """

    op: str
    place: Span | None
    reason: str
    bytes: Size

    def __str__(self) -> str:
        where = f"{self.place.file}:{self.place.line}: " if self.place else ""
        return f"{where}`{self.op}` {self.reason} ({self.bytes} bytes)"


@dataclass(frozen=True, eq=False)
class ShardedBlock:
    """``module(shard, *slots)`` runs the block on one rank; ``slots`` are those of ``captured``, in order.

    ``inputs`` and ``outputs`` have an entry per tensor input and output: the dimension along which it holds this rank's
    tokens only, or None for what is the same on every rank. ``tokens`` is the length of that dimension over all ranks,
    S unless the shell joined text to it; ``local`` counts the ops that run on a rank's tokens as they are.
    ``counterparts`` are the captured nodes' in ``module``: the tensors that stand for them.
    """

    captured: CapturedBlock
    module: fx.GraphModule
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    tokens: Size
    local: int
    attentions: tuple[Note, ...]
    gathers: tuple[Note, ...]
    counterparts: Mapping[fx.Node, fx.Node]


def shard_block(captured: CapturedBlock, rules: Mapping[Any, Rule] = RULES) -> ShardedBlock:
    """Rewrite one captured block. ``rules`` may extend or replace the table.

    Raises ``UserError`` for a block that cannot run on a part of its tokens.
    """
    inputs = sharded_inputs(captured)
    tokens = next(dims[dim] for dims, dim in zip(captured.input_dims, inputs, strict=True) if dim is not None)
    context = _context(captured, tokens)
    _placeholders(context, captured, inputs)
    local = 0
    for node in captured.exported.graph.nodes:
        if node.op in ("placeholder", "output") or not _has_tensor(node):
            continue
        context.enter(node)
        local += _interpret(context, captured, node, rules)
    outputs = _outputs(context, captured)
    context.graph.eliminate_dead_code()
    context.graph.lint()
    module = fx.GraphModule(captured.graph_module, context.graph, f"Sharded{captured.name}")
    back = _back(tokens)
    notes = {
        kind: tuple(
            Note(str(e.node.target), _place(e.node), e.reason, sympy.expand(e.bytes.subs(back)))
            for e in context.events
            if e.kind == kind
        )
        for kind in ("attention", "gathered")
    }
    counterparts = {node: value.node for node, value in context.environment.items() if isinstance(value, Value)}
    parts = {node: _source(value) for node, value in context.environment.items() if isinstance(value, list)}
    counterparts |= {node: source for node, source in parts.items() if source is not None}
    return ShardedBlock(
        captured, module, inputs, outputs, tokens, local, notes["attention"], notes["gathered"], counterparts
    )


def _source(parts: Sequence[Any]) -> fx.Node | None:
    """The call whose result the parts are."""
    calls = {part.node.args[0] for part in parts if isinstance(part, Value) and part.node.target is operator.getitem}
    call = calls.pop() if len(calls) == 1 else None
    return call if isinstance(call, fx.Node) else None


def gather_warnings(captured: CapturedModel, blocks: Sequence[ShardedBlock]) -> tuple[str, ...]:
    """What several ranks gather that a reader of the model would not expect, and what it costs; ``blocks`` in order."""
    lines = [str(note) for block in blocks for note in block.gathers]
    chained = {origin for call in captured.calls for origin in call.origins if origin is not None}
    last = len(captured.calls) - 1
    for escape in sorted(captured.escapes, key=lambda e: (e.call, e.output)):
        call = captured.calls[escape.call]
        if blocks[call.block].outputs[escape.output] is not None and escape not in chained and escape.call != last:
            sizes = blocks[call.block].captured.output_dims[escape.output]
            lines.append(
                f"`{call.path}` returns tokens {list(sizes)} that the model reads outside its blocks: gathered"
            )
    return tuple(lines)


def sharded_inputs(captured: CapturedBlock) -> tuple[int | None, ...]:
    """Per tensor input, the dimension that arrives sharded.

    These are the inputs that look like an output with tokens: what one block hands to the next. Slicing an input is
    right for any that has a token dimension; what else has one (tables, masks) arrives whole and is sliced where it
    meets tokens. Raises ``UserError`` where no input has the tokens as a dimension of their own.
    """
    found = [_token_dim(captured, dims) for dims in captured.input_dims]
    passed_on = [dims in captured.output_dims for dims in captured.input_dims]
    first = next((i for i, dim in enumerate(found) if dim is not None and passed_on[i]), None)
    if first is None:
        first = next((i for i, dim in enumerate(found) if dim is not None and len(captured.input_dims[i]) > 2), None)
        passed_on = [i == first for i in range(len(found))]
    if first is None:
        shapes = (f"{n} {list(d)}" for n, d in zip(captured.input_names, captured.input_dims, strict=True))
        raise UserError(NoShardedInput(None, captured.name, ", ".join(shapes)))
    length = captured.input_dims[first][found[first]]  # type: ignore[index]
    return tuple(
        dim if dim is not None and passed_on[i] and captured.input_dims[i][dim] == length else None
        for i, dim in enumerate(found)
    )


def _token_dim(captured: CapturedBlock, dims: tuple[Size, ...]) -> int | None:
    """The only dimension with tokens, if they are not multiplied by anything: S, or S + T.

    Also B*S, the rows of all clips, where no other size of the block knows of S: these rows are as good as tokens.
    """
    with_tokens = [i for i, size in enumerate(dims) if size.has(S)]
    if len(with_tokens) != 1:
        return None
    size = sympy.expand(dims[with_tokens[0]])
    return with_tokens[0] if not (size - S).has(S) or _opaque(captured, size) else None


def _opaque(captured: CapturedBlock, tokens: Size) -> bool:
    return all(size == tokens for size in captured.symbols.values() if size.has(S))


def _context(captured: CapturedBlock, tokens: Size) -> Context:
    if tokens == S:
        return Context(S, dict(captured.symbols))
    if _opaque(captured, tokens):
        return Context(
            LENGTH, {symbol: LENGTH if size == tokens else size for symbol, size in captured.symbols.items()}
        )
    forward = {S: LENGTH - (tokens - S)}
    symbols = {symbol: sympy.expand(size.subs(forward)) for symbol, size in captured.symbols.items()}
    return Context(LENGTH, symbols)


def _back(tokens: Size) -> dict[sympy.Symbol, Size]:
    return {} if tokens == S else {LENGTH: tokens}


def _placeholders(context: Context, captured: CapturedBlock, inputs: tuple[int | None, ...]) -> None:
    shard = context.placeholder("shard")
    traced = [node for node in captured.exported.graph.nodes if node.op == "placeholder"]
    arriving = iter(inputs)
    values: list[Value] = []
    for node, slot in zip(traced, captured.slots, strict=True):
        like = node.meta["val"]
        dim = next(arriving) if slot.kind == "input" else None
        sizes = context.sizes_of(like)
        layouts: list[Layout | None] = [None] * len(sizes)
        if dim is not None:
            layouts[dim] = Layout((Part(context.tokens, sharded=True),))
        value = Value(context.placeholder(node.name), sizes, tuple(layouts), like.element_size())
        context.environment[node] = value
        values.append(value)
    first = next(value for value in values if value.sharded)
    device = next(node for node in traced if context.environment[node] is first).meta["val"].device
    context.start(shard, first.node, device)
    _sources(context, values)


def _sources(context: Context, values: Iterable[Value]) -> None:
    """Where each symbol's number comes from at run time: a dimension that is it, else one that is a sum with it."""
    plain = [
        (size, value, dim)
        for value in values
        for dim, size in enumerate(value.sizes)
        if value.layouts[dim] is None and size.free_symbols
    ]
    sharded = [v for v in values if v.sharded]
    plain += [(s, v, d) for v in sharded for d, s in enumerate(v.sizes) if v.layouts[d] is None and s.free_symbols]
    for size, value, dim in sorted(plain, key=lambda entry: len(entry[0].free_symbols)):
        if context.knows_size(size):
            continue
        unknown = [symbol for symbol in size.free_symbols if not context.knows_size(symbol)]
        factor = size.coeff(unknown[0]) if len(unknown) == 1 else sympy.S.Zero
        if unknown and not (factor.is_Integer and factor > 0 and not (size - factor * unknown[0]).has(unknown[0])):
            continue
        node = context.call(torch.ops.aten.sym_size.int, value.node, dim)
        context.define_size(size, node)
        if not unknown or isinstance(size, sympy.Symbol):
            continue
        rest = context.size(size - factor * unknown[0])
        times = context.call(operator.sub, node, rest)
        context.define_size(unknown[0], context.call(operator.floordiv, times, int(factor)))


def _has_tensor(node: fx.Node) -> bool:
    """Numbers are made where they are used; see ``Context.number``."""
    value = node.meta.get("val")
    return node.op == "get_attr" or isinstance(value, (torch.Tensor, list, tuple))


def _interpret(context: Context, captured: CapturedBlock, node: fx.Node, rules: Mapping[Any, Rule]) -> bool:
    """Write what stands for ``node``; whether it runs on a rank's tokens as it is."""
    if node.op == "get_attr":
        context.environment[node] = context.graph.get_attr(str(node.target))
        return False
    if node.target is operator.getitem:
        source, index = operands(node)
        if isinstance(context.environment.get(source), list):
            context.environment[node] = context.environment[source][index]
            return False
    sharded = any(value.sharded for value in context.inputs(node))
    known = len(context.events)
    try:
        if random_op(node):
            raise Refused("it draws random numbers", "draw them in sample(clip, generator) and pass them in")
        if not sharded:
            context.environment[node] = context.copy(node)
            return False
        rule = rule_for(node, rules)
        if rule is None:
            raise MixesTokens("is not known to treat tokens one by one")
        context.environment[node] = rule(context, node)
        return len(context.events) == known
    except MixesTokens as reason:
        del context.events[known:]
        context.environment[node] = _gather_around(context, node, str(reason))
        return False
    except Refused as refusal:
        diagnostic = CannotShard(_place(node), captured.name, str(node.target), refusal.reason, refusal.remedy)
        raise UserError(diagnostic) from None


def _gather_around(context: Context, node: fx.Node, reason: str) -> Result:
    """Run ``node`` in full on every rank, and go back to a rank's own tokens where the result shows which they are."""
    replaced: dict[fx.Node, fx.Node] = {}
    layouts: list[Layout] = []
    moved: Size = sympy.S.Zero
    for operand in node.all_input_nodes:
        for value in _values(context.environment.get(operand)):
            if value.sharded:
                moved += value.bytes
                layouts += [layout for layout in value.layouts if layout is not None]
                replaced[operand] = context.whole(value).node
    context.record("gathered", reason, moved)
    return _resharded(context, context.copy(node, replaced), layouts)


def _values(item: Any) -> list[Value]:
    if isinstance(item, Value):
        return [item]
    return [value for part in item for value in _values(part)] if isinstance(item, (list, tuple)) else []


def _resharded(context: Context, result: Result, layouts: list[Layout]) -> Result:
    if isinstance(result, (list, tuple)):
        return [_resharded(context, item, layouts) for item in result]
    if not isinstance(result, Value):
        return result
    with_tokens = [dim for dim, size in enumerate(result.sizes) if context.has_tokens(size)]
    if len(with_tokens) != 1:
        return result
    dim = with_tokens[0]
    layout = next((layout for layout in layouts if same(layout.size, result.sizes[dim])), None)
    return result if layout is None else context.sharded(result, dim, layout)


def _outputs(context: Context, captured: CapturedBlock) -> tuple[int | None, ...]:
    """The dimension of each tensor output that stays sharded; what joins text to its tokens is gathered."""
    output = captured.exported.graph.output_node()
    context.enter(output)
    nodes: list[fx.Node] = []
    dims: list[int | None] = []
    for result in operands(output)[0]:
        value = context.value(result)
        sharded = [dim for dim, layout in enumerate(value.layouts) if layout is not None]
        if sharded and not (len(sharded) == 1 and value.layouts[sharded[0]].pure):  # type: ignore[union-attr]
            context.enter(result)
            context.record("gathered", "is returned with its tokens joined to something else", value.bytes)
            value, sharded = context.whole(value), []
        nodes.append(value.node)
        dims.append(sharded[0] if sharded else None)
    context.graph.output(tuple(nodes))
    return tuple(dims)


def random_op(node: fx.Node) -> bool:
    """Whether a call draws random numbers, in a graph inside it (autocast, no_grad) included."""
    for operand in node.all_input_nodes:
        inner = _submodule(operand)
        if inner is not None and any(random_op(n) for n in inner.graph.nodes if n.op == "call_function"):
            return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "dropout_p" in names:
        return False  # attention: its rule looks at the probability
    return not ("p" in names and (given.get("train") is False or given.get("p") == 0))


def _submodule(node: fx.Node) -> fx.GraphModule | None:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    found = getattr(node.graph.owning_module, str(node.target), None)
    return found if isinstance(found, fx.GraphModule) else None


def _place(node: fx.Node) -> Span | None:
    return stack_span(node.meta.get("stack_trace"))
