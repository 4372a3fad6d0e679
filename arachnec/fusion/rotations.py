"""Rotary positions as models write them. In: a value of the graph. Out: what is rotated, and by which tables.

Two forms are known. Pairs: ``(first * cos - second * sin, first * sin + second * cos)``, tables of half the width of a
head. Whole: ``x * cos + rotated(x) * sin``, tables as wide as a head. In both a pair is two neighbours (interleaved) or
one place of each half of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from arachnec.fusion.ops import stem
from arachnec.fusion.walk import Walk


@dataclass(frozen=True)
class Rotation:
    """``source`` is rotated by ``tables``, along its dimension ``tokens``; ``ops`` are the operations that do it."""

    source: str
    tables: dict[str, str]
    tokens: int
    interleaved: bool
    ops: int


def rotated_pairs(walk: Walk, name: str) -> tuple[str, dict[str, str], bool, int] | None:
    """``(first * cos - second * sin, first * sin + second * cos)``, tables of half the width.

    Neighbours are stacked, halves are put one behind the other: source, tables, whether of neighbours, operations.
    """
    stack = walk.op(name, "stack", "cat")
    if stack is None or len(stack[0].operands) != 2:
        return None
    if stack[0].attrs.get("dim", 0) not in (-1, len(walk.dims(name)) - 1):
        return None
    interleaved = stem(stack[0]) == "stack"
    first, second = (walk.uncast(x) for x in stack[0].operands)
    minus, plus = walk.op(first[0], "sub"), walk.op(second[0], "add")
    products = [walk.op(x, "mul") for matched in (minus, plus) if matched for x in matched[0].operands]
    if minus is None or plus is None or len(products) != 4 or None in products:
        return None
    ops = stack[1] | first[1] | second[1] | minus[1] | plus[1]
    taken: list[tuple[str, int, str]] = []
    for product in products:
        assert product is not None
        for half, table in walk.pairs(product[0]):
            inner, casts = walk.uncast(half)
            if (place := _pair_place(walk, inner, interleaved)) is not None:
                taken.append((place[0], place[1], table))
                ops |= product[1] | place[2] | casts
                break
    if len(taken) != 4 or len({source for source, _, _ in taken}) != 1:
        return None
    (source, p0, cos), (_, p1, sin), *rest = taken
    tables = {(place, _table_key(walk, table)) for _, place, table in rest}
    if (p0, p1) != (0, 1) or tables != {(0, _table_key(walk, sin)), (1, _table_key(walk, cos))}:
        return None
    return source, {"cos": cos, "sin": sin}, interleaved, ops


def rotated_whole(walk: Walk, name: str) -> Rotation | None:
    """``x * cos + rotated(x) * sin``: of neighbours, ``stack(-odd, even)``, or of halves, ``cat(-high, low)``."""
    inner, casts = walk.uncast(name)
    if (total := walk.op(inner, "add")) is None:
        return None
    for left, right in walk.pairs(total[0]):
        plain, crossed = (walk.op(walk.uncast(x)[0], "mul") for x in (left, right))
        if plain is None or crossed is None:
            continue
        ops = casts | total[1] | plain[1] | crossed[1] | walk.uncast(left)[1] | walk.uncast(right)[1]
        for rotated, sin in walk.pairs(crossed[0]):
            if (rotation := _rotation(walk, rotated)) is None:
                continue
            for x, cos in walk.pairs(plain[0]):
                source, more = walk.uncast(x)
                tokens = token_dim(walk, walk.dims(source), cos, sin)
                if source == rotation[0] and tokens is not None:
                    return Rotation(source, {"cos": cos, "sin": sin}, tokens, rotation[1], ops | rotation[2] | more)
    return None


def token_dim(walk: Walk, dims: tuple[sympy.Expr, ...], cos: str, sin: str) -> int | None:
    """The dimension that tables have in common with ``dims`` [B, S, H], [B, S, heads, D] or [B, heads, S, D]."""
    table = walk.dims(cos)
    if table != walk.dims(sin) or len(dims) not in (3, 4) or table[-1:] != dims[-1:] or len(table) > len(dims):
        return None
    one = sympy.Integer(1)
    batch, *middle, _ = (one,) * (len(dims) - len(table)) + table
    if batch not in (one, dims[0]):
        return None
    if middle in ([dims[1]], [dims[1], one]):
        return 1
    return 2 if len(dims) == 4 and middle == [one, dims[2]] else None


def _rotation(walk: Walk, name: str) -> tuple[str, bool, int] | None:
    """What is rotated, whether by neighbours, and the operations."""
    name, ops = walk.uncast(name)
    while (view := walk.op(name, "reshape", "view", "flatten")) is not None:
        name, ops = view[0].operands[0], ops | view[1]
    joined = walk.op(name, "stack", "cat")
    if joined is None or len(joined[0].operands) != 2:
        return None
    dims = walk.dims(name)
    if joined[0].attrs.get("dim", 0) not in (-1, len(dims) - 1):
        return None
    first, casts = walk.uncast(joined[0].operands[0])
    negated = walk.op(first, "neg")
    if negated is None:
        return None
    interleaved = stem(joined[0]) == "stack"
    parts = [_pair_place(walk, x, interleaved) for x in (negated[0].operands[0], joined[0].operands[1])]
    if None in parts:
        return None
    (high, one, more), (low, zero, rest) = parts  # type: ignore[misc]
    if high != low or (zero, one) != (0, 1):
        return None
    source, last = walk.uncast(high)
    return source, interleaved, ops | joined[1] | casts | negated[1] | more | rest | last


def _pair_place(walk: Walk, name: str, interleaved: bool) -> tuple[str, int, int] | None:
    """The source of one place of all pairs, which place, and the operations."""
    name, casts = walk.uncast(name)
    place = _half(walk, name) if interleaved else _side_of_head(walk, name)
    return None if place is None else (place[0], place[1], place[2] | casts)


def _half(walk: Walk, name: str) -> tuple[str, int, int] | None:
    """The even (0) or odd (1) places of a value: ``x[..., i::2]``, or ``unbind(reshape(x, ..., -1, 2), -1)[i]``."""
    if (cut := walk.op(name, "slice")) is not None:
        source, start = cut[0].operands[0], cut[0].attrs.get("start", 0)
        along = cut[0].attrs.get("dim", 0) in (-1, len(walk.dims(source)) - 1)
        if along and cut[0].attrs.get("step", 1) == 2 and 2 * walk.dims(name)[-1] == walk.dims(source)[-1]:
            return (source, start, cut[1]) if type(start) is int else None
    return _unbound(walk, name, -1)


def _unbound(walk: Walk, name: str, dim: int) -> tuple[str, int, int] | None:
    part = walk.op(name, "getitem")
    unbound = walk.op(part[0].operands[0], "unbind") if part else None
    if part is None or unbound is None:
        return None
    pairs = walk.op(unbound[0].operands[0], "reshape", "view", "unflatten")
    rank = len(walk.dims(unbound[0].operands[0]))
    if pairs is None or rank < 2 or unbound[0].attrs.get("dim", 0) not in (dim, rank + dim):
        return None
    if walk.dims(pairs[0].name)[dim] != 2:
        return None
    index = part[0].attrs.get("index")
    return (pairs[0].operands[0], index, part[1] | unbound[1] | pairs[1]) if type(index) is int else None


def _side_of_head(walk: Walk, name: str) -> tuple[str, int, int] | None:
    """The low (0) or high (1) half of each head: slices, chunks, or ``unbind(reshape(x, ..., 2, -1), -2)``."""
    if (half := _unbound(walk, name, -2)) is not None:
        return half
    if (cut := walk.op(name, "slice")) is not None:
        source = cut[0].operands[0]
        rank, width = len(walk.dims(source)), walk.dims(source)[-1]
        start, end = cut[0].attrs.get("start", 0), cut[0].attrs.get("end", "end")
        along = cut[0].attrs.get("dim", 0) in (-1, rank - 1) and cut[0].attrs.get("step", 1) == 1
        if along and 2 * walk.dims(name)[-1] == width:
            return source, 0 if start == 0 and end != "end" else 1, cut[1]
        return None
    part = walk.op(name, "getitem")
    split = walk.op(part[0].operands[0], "chunk", "split", "split_with_sizes") if part else None
    if part is None or split is None:
        return None
    source, index = split[0].operands[0], part[0].attrs.get("index")
    rank = len(walk.dims(source))
    if split[0].attrs.get("dim", 0) not in (-1, rank - 1) or 2 * walk.dims(name)[-1] != walk.dims(source)[-1]:
        return None
    return (source, index, part[1] | split[1]) if type(index) is int else None


def _table_key(walk: Walk, name: str) -> tuple[object, ...]:
    """Two slices of one table with equal bounds are one table."""
    i = walk.graph.index.get(name)
    if i is None or stem(walk.graph.ops[i]) != "slice":
        return (name,)
    return (walk.graph.ops[i].operands, walk.graph.ops[i].attrs)
