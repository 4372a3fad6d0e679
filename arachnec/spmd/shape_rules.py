"""Rules for ops that move positions without computing: reshape, permute, concatenate, slice.

Each proves that the op commutes with sharding, or raises MixesTokens.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from arachnec.spmd.context import Context, MixesTokens, Result
from arachnec.spmd.layouts import (
    Layout,
    Part,
    Size,
    Value,
    alike,
    layout_of,
    product,
    quotient,
    same,
    total,
)

aten = torch.ops.aten
Layouts = tuple[Layout | None, ...]


def operands(node: fx.Node) -> Any:
    """The arguments as the op's schema has them; fx's own type for them allows everything."""
    return node.args


def reshape(context: Context, node: fx.Node) -> Result:
    """Split and merged dimensions, as long as the token dimension stays whole or merges with whole neighbours."""
    value, sizes = context.value(node.args[0]), context.sizes(node)
    sharded = [dim for dim, layout in enumerate(value.layouts) if layout is not None]
    if len(sharded) != 1:
        raise MixesTokens("reshapes a tensor with two token dimensions")
    layouts = _reshaped(value, sharded[0], sizes)
    if layouts is None:
        value = _dealt_for(context, value, sharded[0], sizes)
        layouts = _reshaped(value, sharded[0], sizes)
        assert layouts is not None
    shape = context.local_sizes(sizes, layouts)
    return context.emit(aten.reshape.default, (value.node, shape), {}, node.meta["val"], layouts)


def _reshaped(value: Value, dim: int, sizes: Sequence[Size]) -> Layouts | None:
    """The layouts after a reshape; None where the tokens do not stay one dimension."""
    layout = value.layouts[dim]
    assert layout is not None
    outer = product((*value.sizes[:dim], layout.outer))
    inner = product((layout.inner, *value.sizes[dim + 1 :]))
    for place, size in enumerate(sizes):
        before, after = quotient(outer, product(sizes[:place])), quotient(inner, product(sizes[place + 1 :]))
        if before is None or after is None or not same(size, product((before, layout.length, after))):
            continue
        reshaped = Layout(layout.parts, before, after)
        return tuple(reshaped if i == place else None for i in range(len(sizes)))
    return None


def _dealt_for(context: Context, value: Value, dim: int, sizes: Sequence[Size]) -> Value:
    """The tokens dealt out over one of the factors that the reshape splits them into: frames, or places."""
    layout = value.layouts[dim]
    assert layout is not None
    outer, inner = product((*value.sizes[:dim], layout.outer)), product((layout.inner, *value.sizes[dim + 1 :]))
    factors = []
    for place, size in enumerate(sizes):
        before, after = product(sizes[:place]), product(sizes[place + 1 :])
        inside = quotient(before, outer) is not None and quotient(after, inner) is not None
        outside = quotient(before, product(value.sizes[:dim])), quotient(after, product(value.sizes[dim + 1 :]))
        if inside and not same(size, sympy.S.One) and outside[0] is not None and outside[1] is not None:
            factor = Layout((Part(size, sharded=True),), *outside)
            factors += [factor] if same(factor.size, layout.size) else []  # what is rounded down may leave a rest
    if not layout.alone or not factors:
        raise MixesTokens(f"splits the token dimension: {list(value.sizes)} becomes {list(sizes)}")
    chosen = context.chosen((value.sizes, tuple(sizes)), len(factors))
    return context.redistributed(value, dim, factors[chosen], "splits the token dimension")


def permute(context: Context, node: fx.Node) -> Result:
    value = context.value(node.args[0])
    rank = len(value.sizes)
    if node.target is aten.permute.default:
        order = [dim % rank for dim in operands(node)[1]]
    elif node.target is aten.transpose.int:
        order = list(range(rank))
        a, b = (dim % rank for dim in operands(node)[1:])
        order[a], order[b] = order[b], order[a]
    elif rank == 2:
        order = [1, 0]
    else:
        order = [*range(rank - 2), rank - 1, rank - 2]
    layouts = tuple(value.layouts[dim] for dim in order)
    return context.emit(aten.permute.default, (value.node, order), {}, node.meta["val"], layouts)


def unsqueeze(context: Context, node: fx.Node) -> Result:
    value = context.value(node.args[0])
    dim = operands(node)[1] % (len(value.sizes) + 1)
    layouts = (*value.layouts[:dim], None, *value.layouts[dim:])
    return context.emit(node.target, (value.node, dim), {}, node.meta["val"], layouts)


def squeeze(context: Context, node: fx.Node) -> Result:
    """The dimensions that are 1 for every clip; never the tokens of a rank that happens to hold one."""
    value = context.value(node.args[0])
    wanted = operands(node)[1] if len(node.args) > 1 else range(len(value.sizes))
    dims = [d % len(value.sizes) for d in ([wanted] if isinstance(wanted, int) else wanted)]
    dims = [dim for dim in dims if value.sizes[dim] == 1]
    if any(value.layouts[dim] is not None for dim in dims):
        raise MixesTokens("drops the dimension of a clip's only token")
    layouts = [layout for dim, layout in enumerate(value.layouts) if dim not in dims]
    return context.emit(aten.squeeze.dims, (value.node, dims), {}, node.meta["val"], layouts)


def expand(context: Context, node: fx.Node) -> Result:
    value, sizes = context.value(node.args[0]), context.sizes(node)
    layouts = (None,) * (len(sizes) - len(value.sizes)) + value.layouts
    shape = context.local_sizes(sizes, layouts)
    return context.emit(aten.expand.default, (value.node, shape), {}, node.meta["val"], layouts)


def repeat(context: Context, node: fx.Node) -> Result:
    value, sizes = context.value(node.args[0]), context.sizes(node)
    times = [context.expression(count) for count in operands(node)[1]]
    layouts = (None,) * (len(sizes) - len(value.sizes)) + value.layouts
    if any(layout is not None and count != 1 for layout, count in zip(layouts, times, strict=True)):
        raise MixesTokens("repeats the tokens")
    return context.emit(node.target, (value.node, [context.size(n) for n in times]), {}, node.meta["val"], layouts)


def cat(context: Context, node: fx.Node) -> Result:
    """Along the tokens it joins the operands' parts; along another dimension their tokens must lie alike."""
    values = [context.value(item) for item in operands(node)[0]]
    sizes = context.sizes(node)
    dim = int(context.argument(node, "dim", 0)) % len(sizes)
    values = [value for value in values if len(value.sizes) == len(sizes)]  # an empty [0] tensor joins anything
    along = context.align([_without(value, dim) for value in values], len(sizes), sizes)
    values = [context.aligned(value, along, skip=dim) for value in values]
    layouts = (*along[:dim], _joined(values, dim), *along[dim + 1 :])
    return context.emit(aten.cat.default, ([value.node for value in values], dim), {}, node.meta["val"], layouts)


def _without(value: Value, dim: int) -> Value:
    layouts = (*value.layouts[:dim], None, *value.layouts[dim + 1 :])
    return Value(value.node, value.sizes, layouts, value.itemsize)


def _joined(values: Sequence[Value], dim: int) -> Layout | None:
    if not any(value.layouts[dim] for value in values):
        return None
    parts: list[Part] = []
    for value in values:
        layout = value.layouts[dim]
        if layout is not None and layout.merged:
            raise MixesTokens("joins a dimension in which tokens are merged with others")
        parts += layout.parts if layout is not None else (Part(value.sizes[dim], sharded=False),)
    return Layout(tuple(parts))


def stack(context: Context, node: fx.Node) -> Result:
    values = [context.value(item) for item in operands(node)[0]]
    rank = len(values[0].sizes)
    dim = int(context.argument(node, "dim", 0)) % (rank + 1)
    layouts = context.align(values, rank, values[0].sizes)
    nodes = [context.aligned(value, layouts).node for value in values]
    layouts = (*layouts[:dim], None, *layouts[dim:])
    return context.emit(aten.stack.default, (nodes, dim), {}, node.meta["val"], layouts)


def slice_(context: Context, node: fx.Node) -> Result:
    """Any slice of a plain dimension; of the token dimension, a run of its parts."""
    value = context.value(node.args[0])
    dim = int(context.argument(node, "dim", 0)) % len(value.sizes)
    layout = value.layouts[dim]
    if layout is None:
        return context.again(node, value.layouts)
    if context.argument(node, "step", 1) != 1:
        raise MixesTokens("takes tokens with a stride")
    start, end = _range(context, node, layout)
    return _cut(context, value, dim, start, end, node.meta["val"])


def _range(context: Context, node: fx.Node, layout: Layout) -> tuple[Size, Size]:
    def bound(name: str, absent: Size) -> Size:
        position = context.argument(node, name)
        if position is None:
            return absent
        if isinstance(position, int) and position >= sys.maxsize:
            return layout.size
        size = context.expression(position)
        return sympy.expand(layout.size + size) if size.is_negative else size

    return bound("start", sympy.S.Zero), bound("end", layout.size)


def _cut(context: Context, value: Value, dim: int, start: Size, end: Size, like: Any) -> Value:
    layout = value.layouts[dim]
    assert layout is not None
    if same(start, sympy.S.Zero) and same(end, layout.size):
        return value
    found = None if layout.merged else layout.between(start, end)
    if found is None:
        raise MixesTokens(f"cuts the tokens at {start} and {end}, which are not bounds between video and text")
    layouts = (*value.layouts[:dim], layout_of(found[1]), *value.layouts[dim + 1 :])
    arguments = (value.node, dim, *_here(context, *found))
    return context.emit(aten.slice.Tensor, arguments, {}, like, layouts)


def _here(context: Context, before: tuple[Part, ...], parts: tuple[Part, ...]) -> tuple[fx.Node | int, fx.Node | int]:
    """Where ``parts`` begin and end on this rank."""
    begin = Layout(before).local(context.share)
    return context.size(begin), context.size(sympy.expand(begin + Layout(parts).local(context.share)))


def split(context: Context, node: fx.Node) -> Result:
    value, pieces = context.value(node.args[0]), node.meta["val"]
    dim = int(context.argument(node, "dim", 0)) % len(value.sizes)
    if value.layouts[dim] is None:
        return _pieces(context, node, value, value.layouts)
    results: list[Result] = []
    start: Size = sympy.S.Zero
    for piece in pieces:
        end = sympy.expand(start + context.expression(piece.shape[dim]))
        results.append(_cut(context, value, dim, start, end, piece))
        start = end
    return results


def unbind(context: Context, node: fx.Node) -> Result:
    value = context.value(node.args[0])
    dim = int(context.argument(node, "dim", 0)) % len(value.sizes)
    if value.layouts[dim] is not None:
        raise MixesTokens("takes the tokens apart")
    return _pieces(context, node, value, (*value.layouts[:dim], *value.layouts[dim + 1 :]))


def _pieces(context: Context, node: fx.Node, value: Value, layouts: Layouts) -> Result:
    """An op that gives several tensors of the same layouts."""
    call = context.call(node.target, *context.mapped(node.args), **context.mapped(node.kwargs))
    items = [context.call(operator.getitem, call, i) for i in range(len(node.meta["val"]))]
    return [
        Value(item, context.sizes_of(like), layouts, value.itemsize)
        for item, like in zip(items, node.meta["val"], strict=True)
    ]


def select(context: Context, node: fx.Node) -> Result:
    value = context.value(node.args[0])
    dim = operands(node)[1] % len(value.sizes)
    if value.layouts[dim] is not None:
        raise MixesTokens("takes one of the tokens")
    layouts = (*value.layouts[:dim], *value.layouts[dim + 1 :])
    return context.again(node, layouts)


def slice_scatter(context: Context, node: fx.Node) -> Result:
    """A write into a slice, as functionalisation leaves it."""
    value, source = context.value(node.args[0]), context.value(node.args[1])
    rank = len(value.sizes)
    dim = int(context.argument(node, "dim", 0)) % rank
    along = context.align([_without(value, dim), _without(source, dim)], rank, value.sizes)
    value, source = context.aligned(value, along, skip=dim), context.aligned(source, along, skip=dim)
    layout = value.layouts[dim]
    rest: list[Any] = [context.argument(node, name) for name in ("start", "end", "step")]
    if layout is None:
        if source.layouts[dim] is not None:
            raise MixesTokens("writes tokens into a tensor that is the same on every rank")
        arguments = (value.node, source.node, dim, *context.mapped(rest))
        return context.emit(node.target, arguments, {}, node.meta["val"], along)
    start, end = _range(context, node, layout)
    found = None if layout.merged or rest[2] not in (None, 1) else layout.between(start, end)
    if found is None:
        raise MixesTokens(f"writes to the tokens from {start} to {end}, which are not bounds between video and text")
    written = layout_of(found[1])
    if written is not None and source.layouts[dim] is None:
        source = context.sharded(source, dim, written)
    there = source.layouts[dim]
    if (written is None) != (there is None) or (
        written is not None and there is not None and not alike(written, there)
    ):
        raise MixesTokens("writes tokens that lie differently over the ranks")
    layouts = (*along[:dim], layout, *along[dim + 1 :])
    arguments = (value.node, source.node, dim, *_here(context, *found))
    return context.emit(node.target, arguments, {}, node.meta["val"], layouts)


def pad(context: Context, node: fx.Node) -> Result:
    """Of other dimensions; of the tokens at the end, where what is added, or cut off, is the same on every rank."""
    value = context.value(node.args[0])
    rank, layouts = len(value.sizes), list(value.layouts)
    widths = [context.expression(width) for width in operands(node)[1]]
    for pair in range(len(widths) // 2):
        dim, (before, after) = rank - 1 - pair, widths[2 * pair : 2 * pair + 2]
        layout = layouts[dim]
        if layout is None or (before == 0 and after == 0):
            continue
        tail = total([layout.parts[-1].length, after])
        if before != 0 or layout.merged or layout.parts[-1].sharded or not tail.is_nonnegative:
            raise MixesTokens("pads the tokens")
        layouts[dim] = Layout((*layout.parts[:-1], Part(tail, sharded=False)))
    return context.again(node, layouts)


def moved_within(context: Context, node: fx.Node) -> Result:
    """flip, roll: positions change places within the given dimensions."""
    value = context.value(node.args[0])
    dims = context.argument(node, "dims") or range(len(value.sizes))
    if any(value.layouts[dim] is not None for dim in dims):
        raise MixesTokens("moves tokens to other places")
    return context.again(node, value.layouts)


def last_dimension(context: Context, node: fx.Node) -> Result:
    """view_as_complex and view_as_real: a pair of numbers becomes one, or one a pair."""
    value = context.value(node.args[0])
    like = node.meta["val"]
    layouts = value.layouts[:-1] if like.ndim < len(value.sizes) else (*value.layouts, None)
    return context.emit(node.target, (value.node,), {}, like, layouts)
