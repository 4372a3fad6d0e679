"""The inputs of a block's sharded graph: which arrive sharded, and where every size comes from at run time.

In: a captured block. Out: a ``Context`` with the placeholders of one rank's graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import sympy
import torch

from arachnec.ir.diagnostic import UserError
from arachnec.spmd.context import Context
from arachnec.spmd.layouts import Layout, Part, Size, Value
from arachnec.tracing.blocks import CapturedBlock
from arachnec.tracing.dims import S
from arachnec.tracing.errors import not_captured

LENGTH = sympy.Symbol("L", positive=True, integer=True)
"""The sharded length, where it is not S but, say, S + T: a block whose shell has joined text and video."""


def no_sharded_input_error(block: str, inputs: str) -> UserError:
    return not_captured(
        f"no input of {block} has the video's tokens as a dimension of their own",
        help=f"pass the tokens to the block as [batch, tokens, hidden]; its inputs are {inputs}",
    )


def sharded_inputs(captured: CapturedBlock) -> tuple[int | None, ...]:
    """Per tensor input, the dimension that arrives sharded.

    These are the inputs whose shape is that of an output with tokens: what one block passes to the next. Slicing is
    right for any input with a token dimension; others that have one (tables, masks) arrive complete and are sliced
    where they meet tokens. Raises ``UserError`` where no input has the tokens as a dimension of their own.
    """
    token_dims = [_token_dim(captured, dims) for dims in captured.input_dims]
    passed_on = [dims in captured.output_dims for dims in captured.input_dims]
    first = next((i for i, dim in enumerate(token_dims) if dim is not None and passed_on[i]), None)
    if first is None:
        first = next(
            (i for i, dim in enumerate(token_dims) if dim is not None and len(captured.input_dims[i]) > 2), None
        )
        passed_on = [i == first for i in range(len(token_dims))]
    if first is None:
        shapes = (f"{n} {list(d)}" for n, d in zip(captured.input_names, captured.input_dims, strict=True))
        raise no_sharded_input_error(captured.name, ", ".join(shapes))
    length = captured.input_dims[first][token_dims[first]]  # type: ignore[index]
    return tuple(
        dim if dim is not None and passed_on[i] and captured.input_dims[i][dim] == length else None
        for i, dim in enumerate(token_dims)
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


def context_of(captured: CapturedBlock, tokens: Size) -> Context:
    """An empty graph under construction whose sharded length is ``tokens``: a number in a graph of one clip shape.

    What a mask's values decide keeps its own symbol: no bound of it is its size. Raises ``UserError`` where the length
    of one clip shape depends on the batch.
    """
    known = {symbol: size for symbol, size in captured.symbols.items() if symbol not in captured.unbacked}
    if captured.fixed:
        number = tokens.subs(captured.fixed)
        if not number.is_Integer:
            raise no_sharded_input_error(captured.name, f"rows of {tokens}")
        return Context(number, known)
    if tokens == S:
        return Context(S, known)
    if _opaque(captured, tokens):
        return Context(LENGTH, {symbol: LENGTH if size == tokens else size for symbol, size in known.items()})
    forward = {S: LENGTH - (tokens - S)}
    symbols = {symbol: sympy.expand(size.subs(forward)) for symbol, size in known.items()}
    return Context(LENGTH, symbols)


def add_placeholders(context: Context, captured: CapturedBlock, inputs: tuple[int | None, ...]) -> None:
    """The shard, then the captured block's own placeholders; ``inputs`` as in ``sharded_inputs``."""
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
    _define_sizes(context, values)


def _define_sizes(context: Context, values: Iterable[Value]) -> None:
    """Define every symbol by a dimension of an input: one that equals it, else one that is linear in it."""
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
        others = context.size(size - factor * unknown[0])
        multiple = context.call(operator.sub, node, others)
        context.define_size(unknown[0], context.call(operator.floordiv, multiple, int(factor)))
