"""The sequence-parallel rewrite. In: a captured block. Out: the graph of one rank's share of it, or why there is none.

An abstract interpretation (Cousot and Cousot, POPL 1977). Its domain is ``spmd.layouts``: for every dimension of every
tensor, the positions that a rank holds. Its transfer functions are ``spmd.rules``, one per op. Where a rule cannot
prove that its op commutes with sharding, the op's operands are gathered and it runs in full on every rank. That is
always right, and reported with its cost.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Span
from arachnec.spmd.context import Context, MixesTokens, Refused, Result
from arachnec.spmd.inputs import LENGTH, add_placeholders, context_of, sharded_inputs
from arachnec.spmd.layouts import Layout, Part, Size, Value, same
from arachnec.spmd.rules import rule_for
from arachnec.spmd.shape_rules import operands
from arachnec.tracing.blocks import CapturedBlock, CapturedModel
from arachnec.tracing.errors import stack_span


@dataclass(frozen=True)
class Note:
    """An op that moves tokens between ranks: its place, the reason, and the bytes of its tensors.

    ``bytes`` are over all ranks, of one forward of one block, as an expression of B, S and T.
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

    ``inputs`` and ``outputs`` have an entry per tensor: the sharded dimension, or None where every rank has the same.
    ``tokens`` is the length of that dimension over all ranks: S, unless the shell has joined text to it. ``local``
    counts the ops that run unchanged on a rank's tokens. ``counterparts`` maps captured nodes to nodes of ``module``.
    """

    captured: CapturedBlock
    module: fx.GraphModule
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    tokens: Size
    local: int
    attentions: tuple[Note, ...]
    gathers: tuple[Note, ...]
    exchanges: tuple[Note, ...]
    counterparts: Mapping[fx.Node, fx.Node]


def shard_block(captured: CapturedBlock) -> ShardedBlock:
    """Rewrite one captured block.

    Where tokens are split into frames and places, either can be dealt out: what moves fewest bytes is taken, one choice
    improved after the other. Raises ``UserError`` for a block that cannot run on a part of its tokens.
    """
    best, choices, options = _rewritten(captured, {})
    for key in [key for key, count in options.items() if count > 1]:
        for option in range(1, options[key]):
            other, tried, _ = _rewritten(captured, {**choices, key: option})
            if moved(other) < moved(best):
                best, choices = other, tried
    return best


def moved(block: ShardedBlock) -> float:
    """The bytes of all tensors that move between ranks, at the sizes of the first recording."""
    notes = (*block.attentions, *block.gathers, *block.exchanges)
    return sum(float(note.bytes.subs(block.captured.examples[0])) for note in notes)


def _rewritten(
    captured: CapturedBlock, choices: Mapping[object, int]
) -> tuple[ShardedBlock, dict[object, int], dict[object, int]]:
    """The rewrite with these choices, the choices, and how many options there were for each."""
    inputs = sharded_inputs(captured)
    tokens = next(dims[dim] for dims, dim in zip(captured.input_dims, inputs, strict=True) if dim is not None)
    context = context_of(captured, tokens)
    context.choices.update(choices)
    add_placeholders(context, captured, inputs)
    local = 0
    for node in captured.exported.graph.nodes:
        if node.op in ("placeholder", "output") or not _has_tensor(node):
            continue
        context.enter(node)
        local += _interpret(context, captured, node)
    outputs = _outputs(context, captured)
    context.graph.eliminate_dead_code()
    context.graph.lint()
    module = fx.GraphModule(captured.graph_module, context.graph, f"Sharded{captured.name}")
    symbols = {LENGTH: tokens} | {symbol: captured.symbols[symbol] for symbol in captured.unbacked}
    notes = {
        kind: tuple(
            Note(str(e.node.target), _place(e.node), e.reason, sympy.expand(e.bytes.subs(symbols)))
            for e in context.events
            if e.kind == kind
        )
        for kind in ("attention", "gathered", "exchanged")
    }
    counterparts = {node: value.node for node, value in context.environment.items() if isinstance(value, Value)}
    parts = {node: _source(value) for node, value in context.environment.items() if isinstance(value, list)}
    counterparts |= {node: source for node, source in parts.items() if source is not None}
    block = ShardedBlock(
        *(captured, module, inputs, outputs, tokens, local),
        *(notes["attention"], notes["gathered"], notes["exchanged"], counterparts),
    )
    return block, dict(choices), context.options


def _source(parts: Sequence[Any]) -> fx.Node | None:
    """The call whose result the parts are."""
    calls = {part.node.args[0] for part in parts if isinstance(part, Value) and part.node.target is operator.getitem}
    call = calls.pop() if len(calls) == 1 else None
    return call if isinstance(call, fx.Node) else None


def gather_warnings(captured: CapturedModel, blocks: Sequence[ShardedBlock]) -> tuple[str, ...]:
    """What sequence parallelism gathers inside and outside the blocks, with its cost; one line each."""
    if not blocks:
        return ()
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


def _has_tensor(node: fx.Node) -> bool:
    """Numbers are made where they are used; see ``Context.number``."""
    value = node.meta.get("val")
    return node.op == "get_attr" or isinstance(value, (torch.Tensor, list, tuple))


def _interpret(context: Context, captured: CapturedBlock, node: fx.Node) -> bool:
    """Add the counterpart of ``node``. Returns whether it runs unchanged on a rank's tokens."""
    if node.op == "get_attr":
        context.environment[node] = context.graph.get_attr(str(node.target))
        return False
    if node.target is operator.getitem:
        source, index = operands(node)
        if isinstance(context.environment.get(source), list):
            context.environment[node] = context.environment[source][index]
            return False
    sharded = any(value.sharded for value in context.inputs(node))
    before = len(context.events)
    try:
        if random_op(node):
            raise Refused("it draws random numbers", "draw them in sample(clip, generator) and pass them in")
        if not sharded:
            context.environment[node] = context.copy(node)
            return False
        rule = rule_for(node)
        if rule is None:
            raise MixesTokens("is not known to treat tokens one by one")
        context.environment[node] = rule(context, node)
        return len(context.events) == before
    except MixesTokens as reason:
        del context.events[before:]
        context.environment[node] = _gather_around(context, node, str(reason))
        return False
    except Refused as refusal:
        raise user_error(
            f"{captured.name} cannot run on a part of its tokens: `{node.target}`: {refusal.reason}",
            label="this operation",
            help=refusal.remedy,
            span=_place(node),
        ) from None


def _gather_around(context: Context, node: fx.Node, reason: str) -> Result:
    """Run ``node`` in full on every rank; shard the result again where it has one dimension with tokens."""
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
    lengths = [layout.size for layout in layouts]
    with_tokens = [
        dim
        for dim, size in enumerate(result.sizes)
        if context.has_tokens(size) or any(same(size, length) for length in lengths)
    ]
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
        value = _in_sequence(context, result, value)
        if sharded and not (len(sharded) == 1 and value.layouts[sharded[0]].pure):  # type: ignore[union-attr]
            context.enter(result)
            context.record("gathered", "is returned with its tokens joined to something else", value.bytes)
            value, sharded = context.whole(value), []
        nodes.append(value.node)
        dims.append(sharded[0] if sharded else None)
    context.graph.output(tuple(nodes))
    return tuple(dims)


def _in_sequence(context: Context, node: fx.Node, value: Value) -> Value:
    """Tokens dealt out over frames or places, as the cascade deals them out, where they are all there is."""
    for dim, layout in enumerate(value.layouts):
        if layout is not None and layout.alone and same(layout.size, context.tokens):
            context.enter(node)
            value = context.redistributed(value, dim, Layout((Part(layout.size, sharded=True),)), "is returned")
    return value


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
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "dropout_p" in names:
        return False  # attention: its rule looks at the probability
    return not ("p" in names and (arguments.get("train") is False or arguments.get("p") == 0))


def _submodule(node: fx.Node) -> fx.GraphModule | None:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    module = getattr(node.graph.owning_module, str(node.target), None)
    return module if isinstance(module, fx.GraphModule) else None


def _place(node: fx.Node) -> Span | None:
    return stack_span(node.meta.get("stack_trace"))
