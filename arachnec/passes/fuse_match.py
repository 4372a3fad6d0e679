"""Parts of a region that a hand-written kernel does, found by what they compute and not by the model's name.

A pattern is walked from its last operation to its inputs; operands of sums and products may stand in either order, and
casts and views of the per-sample vectors are looked through. What the kernel calls its arguments is written down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import sympy

from arachnec.ir.nodes import GraphOp
from arachnec.ir.values import Value
from arachnec.passes.fuse_graph import FusionGraph, bits
from arachnec.passes.fuse_ops import Kind, stem

CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
MOVES = ("unsqueeze", "squeeze", "slice", "reshape", "view", "expand")  # of a vector: not of the tokens


@dataclass(frozen=True)
class Match:
    """``kernel`` computes ``results`` (role to value name) of ``operands``; ``options`` are its numbers.

    ``ops`` are the operations it stands for, views between them included.
    """

    kernel: str
    results: dict[str, str]
    operands: dict[str, str]
    options: dict[str, Value] = field(default_factory=dict)
    ops: int = 0


@dataclass(frozen=True)
class _Norm:
    """A norm as it stands in the graph: of ``x``, with what ``weight`` and ``bias`` it has."""

    x: str
    operands: dict[str, str]
    options: dict[str, Value]
    ops: int


def match_region(graph: FusionGraph, region: int) -> tuple[Match, ...]:
    """Kernels for parts of ``region``, the largest first found from its end; no operation is in two."""
    found: list[Match] = []
    free = region
    for i in reversed(list(bits(region & graph.core))):
        if not free >> i & 1:
            continue
        for pattern in _PATTERNS:
            match = pattern(_Walk(graph, free), graph.ops[i].name)
            if match is not None and _is_closed(graph, match, region):
                found.append(match)
                free &= ~match.ops
                break
    return tuple(reversed(found))


def kernel_name(graph: FusionGraph, region: int, matches: tuple[Match, ...]) -> str:
    """``"norm_modulate"``, ``"2 norm_modulate"``, ``"generated"``: what does all of the region but its joins."""
    rest = region & graph.core
    for match in matches:
        rest &= ~match.ops
    counts = Counter(match.kernel for match in matches)
    names = [name if n == 1 else f"{n} {name}" for name, n in counts.items()]
    if any(graph.kinds[i] is not Kind.JOIN for i in bits(rest)):
        names.append("generated")
    return " + ".join(names)


def _is_closed(graph: FusionGraph, match: Match, region: int) -> bool:
    """Whether nothing but the results is read by others, so that the rest need not exist."""
    results = {graph.index[name] for name in match.results.values()}
    return not any(i not in results and graph.escapes(i, match.ops) for i in bits(match.ops & graph.core))


@dataclass(frozen=True)
class _Walk:
    """Looks at operations of a region from their results."""

    graph: FusionGraph
    free: int

    def op(self, name: str, *stems: str) -> tuple[GraphOp, int] | None:
        """The operation of the region that makes ``name``, if it is one of ``stems``."""
        i = self.graph.index.get(name)
        if i is None or not self.free >> i & 1 or stem(self.graph.ops[i]) not in stems:
            return None
        return self.graph.ops[i], 1 << i

    def uncast(self, name: str) -> tuple[str, int]:
        """The value before casts inside the region."""
        ops = 0
        while (found := self.op(name, *CASTS)) is not None:
            name, ops = found[0].operands[0], ops | found[1]
        return name, ops

    def vector(self, name: str) -> tuple[str, int]:
        """The value before casts and moves inside the region that keep all of it."""
        count = self.graph.sizes.count(name)
        ops = 0
        while (found := self.op(name, *CASTS, *MOVES)) is not None:
            before = found[0].operands[0]
            if self.graph.sizes.count(before) != count:
                break
            name, ops = before, ops | found[1]
        return name, ops

    def pairs(self, op: GraphOp) -> Iterator[tuple[str, str]]:
        """The two operands of a sum or product, in both orders."""
        if len(op.operands) == 2 and op.attrs.get("alpha", 1) == 1:
            yield op.operands[0], op.operands[1]
            yield op.operands[1], op.operands[0]

    def one_plus(self, name: str) -> tuple[str, int] | None:
        """s of ``1 + s``, however it is moved."""
        moved, ops = self.vector(name)
        found = self.op(moved, "add")
        if found is None or len(found[0].operands) != 1 or found[0].attrs.get("other") != 1:
            return None
        inner, more = self.vector(found[0].operands[0])
        return inner, ops | found[1] | more

    def dims(self, name: str) -> tuple[sympy.Expr, ...]:
        return self.graph.sizes.shapes.get(name, ())


def _norm(walk: _Walk, name: str) -> _Norm | None:
    """LayerNorm or RMSNorm over the last dimension, whole or written out."""
    name, casts = walk.uncast(name)
    if (found := walk.op(name, "layer_norm", "rms_norm")) is not None:
        op, bit = found
        shape = op.attrs.get("normalized_shape")
        if not isinstance(shape, tuple) or len(shape) != 1:
            return None
        kind = "layer" if stem(op) == "layer_norm" else "rms"
        eps = op.attrs.get("eps", 1e-5 if kind == "layer" else None)
        if eps is None:
            return None
        ops, vectors = casts | bit, {}
        for role, vector in zip(("weight", "bias"), op.operands[1:], strict=False):
            vectors[role], more = walk.uncast(vector)
            ops |= more
        return _Norm(op.operands[0], vectors, {"norm": kind, "eps": eps}, ops)
    if (found := walk.op(name, "mul")) is None:
        return None
    for left, right in walk.pairs(found[0]):
        if (root := _root_mean_square(walk, left, right)) is not None:
            return replace(root, ops=root.ops | casts | found[1])
        weight_is_vector = len(walk.dims(right)) == 1
        inner = _norm(walk, left) if weight_is_vector else None
        if inner is not None and inner.options["norm"] == "rms" and not inner.operands:
            return _Norm(inner.x, {"weight": right}, inner.options, inner.ops | casts | found[1])
    return None


def _root_mean_square(walk: _Walk, x: str, factor: str) -> _Norm | None:
    """``x * rsqrt(mean(x^2) + eps)``, given x and the other factor."""
    source, ops = walk.uncast(x)
    name = factor
    steps: list[GraphOp] = []
    for wanted in ("rsqrt", "add", "mean", "pow"):
        name, casts = walk.uncast(name)
        if (found := walk.op(name, wanted)) is None or len(found[0].operands) != 1:
            return None
        steps.append(found[0])
        ops |= found[1] | casts
        name = found[0].operands[0]
    squared, casts = walk.uncast(name)
    _, plus, mean, power = steps
    last = mean.attrs.get("dim") in ((-1,), (len(walk.dims(mean.name)) - 1,))
    if (
        squared != source
        or power.attrs.get("exponent") not in (2, 2.0)
        or not last
        or mean.attrs.get("keepdim") is not True
    ):
        return None
    eps = plus.attrs.get("other")
    return _Norm(x, {}, {"norm": "rms", "eps": eps}, ops | casts) if type(eps) is float else None


def _modulated(walk: _Walk, name: str) -> tuple[_Norm, dict[str, str]] | None:
    """``norm * (1 + scale) + shift``, or a norm alone."""
    inner, casts = walk.uncast(name)
    found = walk.op(inner, "add")
    if found is not None:
        for product, shift in walk.pairs(found[0]):
            product, more = walk.uncast(product)
            times = walk.op(product, "mul")
            for left, right in walk.pairs(times[0]) if times else ():
                norm, scale = _norm(walk, left), walk.one_plus(right)
                if times and norm is not None and scale is not None:
                    moved, moves = walk.vector(shift)
                    ops = norm.ops | scale[1] | moves | found[1] | times[1] | casts | more
                    return replace(norm, ops=ops), {"scale": scale[0], "shift": moved}
    norm = _norm(walk, name)
    return None if norm is None else (norm, {})


def _norm_modulate(walk: _Walk, name: str) -> Match | None:
    found = _modulated(walk, name)
    if found is None or not found[1]:
        return None
    norm, vectors = found
    x, ops = _same_dtype(walk, norm.x, name)
    if x is None:
        return None
    return Match("norm_modulate", {"y": name}, {"x": x, **norm.operands, **vectors}, norm.options, norm.ops | ops)


def _gate_residual_norm_modulate(walk: _Walk, name: str) -> Match | None:
    found = _modulated(walk, name)
    if found is None:
        return None
    norm, vectors = found
    h, casts = _same_dtype(walk, norm.x, name)
    if h is None:
        return None
    inner, more = walk.uncast(h)
    total, casts, dims = walk.op(inner, "add"), casts | more, walk.dims(h)
    if total is None:
        return None
    plain: Match | None = None
    for residual, side in walk.pairs(total[0]):
        if walk.dims(residual) != dims or walk.dims(side) != dims:
            continue
        residual, more = _same_dtype(walk, residual, h)  # type: ignore[assignment]
        if residual is None:
            continue
        ops = norm.ops | casts | more | total[1]
        operands = {"branch": side, "residual": residual, **norm.operands, **vectors}
        plain = plain or Match("gate_residual_norm_modulate", {"h": h, "y": name}, operands, norm.options, ops)
        product, side_casts = walk.uncast(side)
        times = walk.op(product, "mul")
        for branch, gate in walk.pairs(times[0]) if times else ():
            if times and walk.dims(branch) == dims and walk.dims(gate) != dims:
                vector, moves = walk.vector(gate)
                branch, branch_casts = walk.uncast(branch)
                ops |= times[1] | moves | side_casts | branch_casts
                return replace(plain, operands={**operands, "branch": branch, "gate": vector}, ops=ops)
    return plain


def _same_dtype(walk: _Walk, name: str, like: str) -> tuple[str | None, int]:
    """``name``, or the next it is a cast of, in the dtype of ``like``: kernels return the dtype that they are given."""
    ops = 0
    while walk.graph.dtypes.get(name) != walk.graph.dtypes.get(like):
        if (cast := walk.op(name, *CASTS)) is None:
            return None, 0
        name, ops = cast[0].operands[0], ops | cast[1]
    return name, ops


def _norm_rope(walk: _Walk, name: str) -> Match | None:
    """Rotary positions of neighbouring pairs on a normalised x, with one angle for a pair.

    The form with tables as wide as x is left to be generated: that both places of a pair hold one angle is then a
    property of numbers, which no graph shows.
    """
    found = _rotated_halves(walk, name)
    if found is None:
        return None
    source, tables, ops = found
    inner, moves = source, 0
    while (view := walk.op(inner, "reshape", "view")) is not None:
        inner, moves = view[0].operands[0], moves | view[1]
    norm = _norm(walk, inner)
    dims = walk.dims(name)
    if norm is None or len(dims) != 5 or dims[4] != 2:
        return None
    x, casts = _same_dtype(walk, norm.x, name)
    tokens, heads, half = dims[1:4]
    table = {walk.dims(tables[role]) for role in ("cos", "sin")}
    if x is None or not (heads.is_Integer and half.is_Integer) or table - {(1, tokens, 1, half), (tokens, 1, half)}:
        return None
    over = walk.dims(norm.x)[2:]
    if over not in ((2 * half * heads,), (heads, 2 * half)) or (len(over) == 1 and heads != 1 and not norm.operands):
        return None
    options = {**norm.options, "heads": int(heads), "size": 2 * int(half)}
    return Match("norm_rope", {"y": name}, {"x": x, **norm.operands, **tables}, options, ops | moves | norm.ops | casts)


def _half(walk: _Walk, name: str) -> tuple[str, int, int] | None:
    """The even (0) or odd (1) places of a value: ``unbind(reshape(x, ..., -1, 2), -1)[i]``."""
    part = walk.op(name, "getitem")
    whole = walk.op(part[0].operands[0], "unbind") if part else None
    if part is None or whole is None or whole[0].attrs.get("dim") != -1:
        return None
    pairs = walk.op(whole[0].operands[0], "reshape", "view", "unflatten")
    if pairs is None or walk.dims(pairs[0].name)[-1:] != (2,):
        return None
    index = part[0].attrs.get("index")
    return (pairs[0].operands[0], index, part[1] | whole[1] | pairs[1]) if type(index) is int else None


def _rotated_halves(walk: _Walk, name: str) -> tuple[str, dict[str, str], int] | None:
    """``stack(even * cos - odd * sin, even * sin + odd * cos)``, tables of half the width."""
    stack = walk.op(name, "stack")
    if stack is None or len(stack[0].operands) != 2:
        return None
    first, second = (walk.uncast(x) for x in stack[0].operands)
    minus, plus = walk.op(first[0], "sub"), walk.op(second[0], "add")
    products = [walk.op(x, "mul") for found in (minus, plus) if found for x in found[0].operands]
    if minus is None or plus is None or len(products) != 4 or None in products:
        return None
    ops = stack[1] | first[1] | second[1] | minus[1] | plus[1]
    taken: list[tuple[str, int, str]] = []
    for product in products:
        assert product is not None
        for half, table in walk.pairs(product[0]):
            inner, casts = walk.uncast(half)
            if (place := _half(walk, inner)) is not None:
                taken.append((place[0], place[1], table))
                ops |= product[1] | place[2] | casts
                break
    if len(taken) != 4 or len({source for source, _, _ in taken}) != 1:
        return None
    (source, p0, cos), (_, p1, sin), *rest = taken
    tables = {(place, table_key(walk, table)) for _, place, table in rest}
    if (p0, p1) != (0, 1) or tables != {(0, table_key(walk, sin)), (1, table_key(walk, cos))}:
        return None
    return source, {"cos": cos, "sin": sin}, ops


def table_key(walk: _Walk, name: str) -> tuple[object, ...]:
    """Two slices of one table with equal bounds are one table."""
    i = walk.graph.index.get(name)
    if i is None or stem(walk.graph.ops[i]) != "slice":
        return (name,)
    return (walk.graph.ops[i].operands, walk.graph.ops[i].attrs)


def _bias_gelu(walk: _Walk, name: str) -> Match | None:
    found = walk.op(name, "gelu")
    total = walk.op(found[0].operands[0], "add") if found else None
    for x, bias in walk.pairs(total[0]) if total else ():
        if found and total and len(walk.dims(bias)) == 1 and walk.dims(x)[-1:] == walk.dims(bias):
            options = {"approximate": found[0].attrs.get("approximate", "none")}
            return Match("bias_gelu", {"y": name}, {"x": x, "bias": bias}, options, found[1] | total[1])
    return None


_PATTERNS = (_gate_residual_norm_modulate, _norm_modulate, _norm_rope, _bias_gelu)
