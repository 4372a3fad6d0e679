"""The kernel ``norm_rope``: rotary positions as models write them, on a norm or none, of all tokens or some.

Tables as wide as a head are passed to the kernel as they are, a value per place. That both places of a pair hold one
angle is a property of their numbers, which no graph shows, and the kernel does not need it.

Two forms are known. Pairs: ``(first * cos - second * sin, first * sin + second * cos)``, tables of half the width of a
head. Whole: ``x * cos + rotated(x) * sin``, tables as wide as a head. In both a pair is two neighbours (interleaved) or
one place of each half of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from arachnec.fusion.graph import stem
from arachnec.fusion.match_norm import find_norm
from arachnec.fusion.walk import Match, Walk, same_dtype
from arachnec.ir.nodes import GraphOp
from arachnec.ir.values import Value


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


COMPLEX = ("complex64", "complex128")
_VIEWED = ("reshape", "view", "_unsafe_view", "flatten", "unflatten")


def norm_rope(walk: Walk, name: str) -> Match | None:
    """One angle for a pair, of neighbours or of halves: ``first * cos - second * sin, first * sin + second * cos``."""
    pairs = rotated_pairs(walk, name)
    if pairs is None:
        return None
    source, tables, interleaved, ops = pairs
    dims = walk.dims(name)
    if interleaved:  # a pair is a dimension of its own
        dims = (*dims[:-2], 2 * dims[-2])
    tokens = token_dim(walk, (*dims[:-1], dims[-1] / 2), tables["cos"], tables["sin"])
    if tokens is None:
        return None
    rotation = Rotation(source, tables, tokens, interleaved, ops)
    return _on_norm(walk, name, rotation, dims, {"pairs": True} if interleaved else {})


def complex_rope(walk: Walk, name: str) -> Match | None:
    """A pair of neighbours as a complex number, times one: ``view_as_complex(pairs of x) * freqs_cis``.

    ``name`` is the product, or the row that it is viewed as and cast to.
    """
    inner, ops = walk.uncast(name)
    while (view := walk.op(inner, *_VIEWED, "view_as_real")) is not None:
        inner, ops = view[0].operands[0], ops | view[1]
    product = walk.op(inner, "mul")
    for left, freqs_cis in walk.pairs(product[0]) if product else ():
        number, casts = walk.uncast(left)
        if product is None or (seen := walk.op(number, "view_as_complex")) is None:
            continue
        *rows, half = walk.dims(number)
        if inner != name and walk.dims(name) != (*rows, 2 * half):
            return None
        tokens = token_dim(walk, (*rows, half), freqs_cis, freqs_cis)
        if tokens is None or walk.graph.dtypes.get(freqs_cis) not in COMPLEX:
            continue
        pairs, (moved, more) = seen[0].operands[0], _unviewed(walk, seen[0].operands[0])
        source, rest = walk.uncast(moved)
        rotation = Rotation(
            source, {"freqs_cis": freqs_cis}, tokens, True, ops | product[1] | casts | seen[1] | more | rest
        )
        options: dict[str, Value] = {"number": True} if inner == name else {}
        return _on_norm(walk, name, rotation, (*rows, 2 * half), options, like=pairs if inner == name else name)
    return None


def wide_rope(walk: Walk, name: str) -> Match | None:
    """``x * cos + rotated(x) * sin`` with tables as wide as a head, on every token."""
    rotation = rotated_whole(walk, name)
    return None if rotation is None else _on_norm(walk, name, rotation, walk.dims(name), {})


def joined_rope(walk: Walk, name: str) -> Match | None:
    """The same on the first or last tokens of a sequence, which others (a caption) join as they are."""
    outer, ops = _uncut(walk, name)
    if (matched := walk.op(outer, "slice_scatter", "cat")) is None or len(matched[0].operands) != 2:
        return None
    op, bit = matched
    part, rest = op.operands
    if stem(op) == "cat" and (rotation := rotated_whole(walk, rest)) is not None:
        part, rest = rest, part
    else:
        rotation = rotated_whole(walk, part) or rotated_whole(walk, rest)
        part, rest = (part, rest) if rotated_whole(walk, part) is not None else (rest, part)
    dims = walk.dims(name)
    if rotation is None or op.attrs.get("dim", 0) not in (rotation.tokens, rotation.tokens - len(dims)):
        return None
    cut = walk.op(rotation.source, "slice")
    side = None if cut is None else _side(cut[0], rotation.tokens)
    if cut is None or side is None:
        return None
    base, more = _uncut(walk, cut[0].operands[0])
    ops |= bit | rotation.ops | cut[1] | more
    if stem(op) == "slice_scatter":
        other, more = _uncut(walk, rest)
        if other != base or _side(op, rotation.tokens) != side or op.operands[1] != part:
            return None
    else:
        kept = walk.op(rest, "slice")
        if kept is None or _side(kept[0], rotation.tokens) not in ({"front", "back"} - {side}):
            return None
        if op.operands.index(part) != (0 if side == "front" else 1):
            return None
        other, more = _uncut(walk, kept[0].operands[0])
        more |= kept[1]
        if other != base or sympy.expand(
            walk.dims(part)[rotation.tokens] + walk.dims(rest)[rotation.tokens] - dims[rotation.tokens]
        ):
            return None
    if len(walk.dims(rotation.tables["cos"])) == len(dims) and walk.dims(rotation.tables["cos"])[0] != 1:
        return None  # each sample has angles of its own: the others' rows would have to be put between them
    rotation = Rotation(base, rotation.tables, rotation.tokens, rotation.interleaved, ops | more)
    return _on_norm(walk, name, rotation, dims, {"rotated": side})


def norm_alone(walk: Walk, name: str) -> Match | None:
    """A norm of two operations or more, with nothing behind it."""
    norm = find_norm(walk, name)
    if norm is None or (norm.ops & walk.graph.core).bit_count() < 2:
        return None
    x, casts = same_dtype(walk, norm.x, name)
    dims = walk.dims(name)
    if x is None or walk.dims(norm.x) != dims:
        return None
    if len(dims) != 4:
        return Match("norm_modulate", {"y": name}, {"x": x, **norm.operands}, norm.options, norm.ops | casts)
    heads = next((i for i in (2, 1) if dims[i].is_Integer), None)
    if heads is None or not dims[3].is_Integer or int(dims[3]) % 2:
        return None
    options: dict[str, Value] = {**norm.options, "heads": int(dims[heads]), "size": int(dims[3])}
    if heads == 1:
        options["layout"] = "heads"
    return Match("norm_rope", {"y": name}, {"x": x, **norm.operands}, options, norm.ops | casts)


def _on_norm(
    walk: Walk, name: str, rotation: Rotation, dims: tuple[sympy.Expr, ...], options: dict[str, Value], like: str = ""
) -> Match | None:
    """The kernel for ``rotation`` on a norm of rows ``dims``: tokens before heads, after them, or without heads."""
    inner, moves = _unviewed(walk, rotation.source)
    norm = find_norm(walk, inner)
    if norm is None:
        return None
    heads = sympy.Integer(1) if len(dims) == 3 else dims[3 - rotation.tokens]
    size, read = dims[-1], walk.dims(norm.x)
    x, casts = same_dtype(walk, norm.x, like or name)
    if x is None or not (heads.is_Integer and size.is_Integer) or int(size) % 2 or len(dims) not in (3, 4):
        return None
    across = len(read) == 3 and len(dims) == 4
    if across and (rotation.tokens != 1 or read[-1] != heads * size or (heads != 1 and not norm.operands)):
        return None
    if not across and read != dims:
        return None
    numbers: dict[str, Value] = {**norm.options, "heads": int(heads), "size": int(size), **options}
    if rotation.tokens == 2:
        numbers["layout"] = "heads"
    elif len(dims) == 3:
        numbers["layout"] = "rows"
    if not rotation.interleaved:
        numbers["interleaved"] = False
    ops = rotation.ops | moves | norm.ops | casts
    return Match("norm_rope", {"y": name}, {"x": x, **norm.operands, **rotation.tables}, numbers, ops)


def _unviewed(walk: Walk, name: str) -> tuple[str, int]:
    moves = 0
    while (view := walk.op(name, *_VIEWED)) is not None:
        name, moves = view[0].operands[0], moves | view[1]
    return name, moves


def _uncut(walk: Walk, name: str) -> tuple[str, int]:
    """The value behind slices, and writes of slices, that are all of a tensor."""
    ops = 0
    while (matched := walk.op(name, "slice", "slice_scatter")) is not None:
        inner = matched[0].operands[-1]
        if walk.dims(inner) != walk.dims(name) or matched[0].attrs.get("step", 1) != 1:
            break
        name, ops = inner, ops | matched[1]
    return name, ops


def _side(op: GraphOp, tokens: int) -> str | None:
    """Whether a slice along the tokens is of the first or of the last of them."""
    start, end = op.attrs.get("start", 0), op.attrs.get("end", "end")
    if op.attrs.get("dim", 0) != tokens or op.attrs.get("step", 1) != 1:
        return None
    if end == "end":
        return None if start == 0 else "back"
    return "front" if start == 0 else None
