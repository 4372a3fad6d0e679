"""Where the operand of a view is read: the place of a value, carried back through views, splits and joins of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Cut, Index, Size, Space, Unsupported, at_least, tidy
from arachnec.codegen.triton.operations import (
    RESHAPES,
    SPLITS,
    dim_of,
    is_fixed,
    number_of,
    option,
    shape_of,
    size_of,
    value_of,
)

aten, prims = torch.ops.aten, torch.ops.prims

Place = tuple[Index, ...]  # an index for each dimension


@dataclass(frozen=True)
class Choice:
    """A value that is ``node``'s at ``place`` where ``index`` is in [first, end) and a multiple of ``step`` on from
    ``first``; elsewhere another's."""

    node: fx.Node
    place: Place
    index: Index
    first: int
    end: int
    step: int = 1


def broadcast(space: Space, place: Place, value: Tensor) -> Place:
    """The place of an operand of an element-wise operation."""
    there = place[len(place) - value.ndim :]
    return tuple(space.zero if size == 1 else at for size, at in zip(shape_of(value), there, strict=True))


def moved(place: Place, dim: int, index: Index) -> Place:
    return (*place[:dim], index, *place[dim + 1 :])


def bounds(node: fx.Node, size: Size, position: int) -> tuple[Size, Size, int]:
    """First, end and step of a slice along a dimension of ``size``, where its sign is known."""
    start, stop, step = (
        number_of(option(node, position + k, name, None)) for k, name in enumerate(("start", "end", "step"))
    )

    def clamped(end: Size | None, default: Size) -> Size:
        if end is None or (isinstance(end, int) and end >= 2**62):
            return default
        if not at_least(end, 0):
            if not at_least(-1, end):
                raise Unsupported(f"`{node.name}` cuts where only a run knows")
            end = tidy(size + end)
            return end if at_least(end, 0) or not is_fixed(end) else 0
        if at_least(end, size):
            return size
        if not at_least(size, end) and is_fixed(size):
            raise Unsupported(f"`{node.name}` cuts where only a run knows")
        return end

    return clamped(start, 0), clamped(stop, size), int(step or 1)


def before(node: fx.Node, place: Place, space: Space) -> tuple[fx.Node, Place]:
    """The operand of a view, and where it is read."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        raise Unsupported(f"`{target}`")
    source = node.args[0]
    value, args = value_of(source), node.args
    rank = value.ndim
    if target is aten.expand.default:
        return source, broadcast(space, place, value)
    if target is prims.broadcast_in_dim.default:
        there = tuple(place[dim] for dim in args[2])  # type: ignore[union-attr, index]
        return source, tuple(space.zero if s == 1 else at for s, at in zip(shape_of(value), there, strict=True))
    if target is aten.permute.default:
        order = [dim % rank for dim in args[1]]  # type: ignore[union-attr, operator]
        return source, tuple(place[order.index(dim)] for dim in range(rank))
    if target in (aten.transpose.int, aten.t.default):
        a, b = (int(x) % rank for x in (args[1:3] or (0, 1)))  # type: ignore[arg-type]
        swapped = list(place)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return source, tuple(swapped)
    if target is aten.select.int:
        dim, at = int(args[1]) % rank, number_of(args[2])  # type: ignore[arg-type]
        at = at if at_least(at, 0) else tidy(at + shape_of(value)[dim])
        return source, (*place[:dim], space.zero + at, *place[dim:])
    if target is aten.slice.Tensor:
        dim = dim_of(node, rank)
        start, _, step = bounds(node, shape_of(value)[dim], 2)
        return source, moved(place, dim, place[dim] * step + start)
    if target in RESHAPES:
        return source, _reshaped(place, value_of(node), value, space)
    raise Unsupported(f"`{target}`")


def part(node: fx.Node, place: Place, space: Space) -> tuple[fx.Node, Place]:
    """One of the parts that a split gives: of what, and where."""
    split, index = node.args
    if not isinstance(split, fx.Node) or split.target not in SPLITS:
        raise Unsupported(f"`{getattr(split, 'target', split)}`")
    source = split.args[0]
    assert isinstance(source, fx.Node) and isinstance(index, int)
    dim = dim_of(split, value_of(source).ndim)
    if split.target is aten.unbind.int:
        return source, (*place[:dim], space.zero + index, *place[dim:])
    sizes = [size_of(piece.shape[dim]) for piece in split.meta["val"]]
    return source, moved(place, dim, place[dim] + tidy(sum(sizes[:index])))


def _reshaped(place: Place, value: Tensor, source: Tensor, space: Space) -> Place:
    """Dimensions that were not touched stay; between them, those of equally many elements are merged and divided."""
    shape, given = shape_of(value), shape_of(source)
    indices: list[Index] = [space.zero] * len(given)
    at, to = 0, 0
    while at < len(shape) or to < len(given):
        end, stop = at + 1, to + 1
        left, right = (math.prod(shape[at:end]), math.prod(given[to:stop]))
        while tidy(left) != tidy(right):
            if end < len(shape) and (stop >= len(given) or _divides(tidy(left), tidy(right))):
                left, end = left * shape[end], end + 1
            elif stop < len(given):
                right, stop = right * given[stop], stop + 1
            else:
                raise Unsupported("it merges or splits dimensions that clips change")
        flat = space.zero
        for dim in range(at, min(end, len(shape))):
            flat = flat * shape[dim] + place[dim]
        indices[to:stop] = flat.divided(space, given[to:stop])
        at, to = end, stop
    return tuple(indices[: len(given)])


def _divides(size: Size, other: Size) -> bool:
    """Whether ``size`` is the smaller side of a reshape, so that more has to be merged to it."""
    if is_fixed(size) and is_fixed(other):
        return bool(size < other)
    return at_least(other, size) or is_fixed(size)


def joined(node: fx.Node, place: Place, space: Space) -> list[Choice | tuple[fx.Node, Place]]:
    """The values that a join is made of, the last of which holds where no choice before it does.

    Raises ``Cut`` where rows of different parts would be in one program.
    """
    value = value_of(node)
    dim = dim_of(node, value.ndim)
    at, size = place[dim], shape_of(value)[dim]
    if node.target is aten.cat.default:
        parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        begin: Size = 0
        choices: list[Choice | tuple[fx.Node, Place]] = []
        for operand in parts:
            width = shape_of(value_of(operand))[dim]
            end = tidy(begin + width)
            there = moved(place, dim, space.zero if width == 1 else at + tidy(-begin))
            if (hit := _inside(at, begin, end, space)) is True:
                return [*choices, (operand, there)]
            if hit is None:
                choices.append(Choice(operand, there, at, begin, end))
            begin = end
        if not choices:
            raise Unsupported(f"`{node.name}` joins rows that no part has")
        last = choices.pop()
        assert isinstance(last, Choice)
        return [*choices, (last.node, last.place)]
    base, new = node.args[0], node.args[1]
    assert isinstance(base, fx.Node) and isinstance(new, fx.Node)
    if node.target is aten.select_scatter.default:
        start = number_of(node.args[3])
        start = start if at_least(start, 0) else tidy(start + size)
        end, step = tidy(start + 1), 1
        there = tuple(x for k, x in enumerate(place) if k != dim)
    else:
        start, end, step = bounds(node, size, 3)
        there = moved(place, dim, at + tidy(-start) if step == 1 else _stepped(at, start, step, space))
    hit = _inside(at, start, end, space)
    if hit is False:
        return [(base, place)]
    if hit is True and step == 1:
        return [(new, there)]
    return [Choice(new, there, at, start, end, step), (base, place)]


def _stepped(at: Index, start: int, step: int, space: Space) -> Index:
    quotient, _ = at.quotient(space, step)
    return quotient + -(start // step)


def _inside(at: Index, begin: Size, end: Size, space: Space) -> bool | None:
    """Whether an index is in [begin, end): always, never, or sometimes, for lanes. Rows are cut where it changes."""
    last = at.last(space)
    if at_least(at.offset, begin) and at_least(end - 1, last):
        return True
    if at_least(begin - 1, last) or at_least(at.offset, end):
        return False
    rows = [k for k in at.used if k < space.leads]
    if not rows:
        return None
    if len(at.used) == 1 and at.factors[rows[0]] == 1 and rows[0] != space.lane:
        for edge in (begin, end):
            position = tidy(edge - at.offset)
            if at_least(position, 1) and at_least(space.sizes[rows[0]] - 1, position):
                raise Cut(rows[0], position)
    raise Unsupported("it joins rows where only a run knows")
