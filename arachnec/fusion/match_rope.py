"""The kernel ``norm_rope``: rotary positions on a norm, of all tokens or of some, and a norm alone.

Tables as wide as a head are passed to the kernel as they are, a value per place. That both places of a pair hold one
angle is a property of their numbers, which no graph shows, and the kernel does not need it.
"""

from __future__ import annotations

import sympy

from arachnec.fusion.match_norm import find_norm
from arachnec.fusion.ops import stem
from arachnec.fusion.rotations import Rotation, rotated_pairs, rotated_whole, token_dim
from arachnec.fusion.walk import Match, Walk, same_dtype
from arachnec.ir.nodes import GraphOp
from arachnec.ir.values import Value

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
