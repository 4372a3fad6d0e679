"""LayerNorm and RMSNorm over the last dimension, as one operation or written out, with their weight and bias."""

from __future__ import annotations

from dataclasses import dataclass, replace

from arachnec.fusion.graph import stem
from arachnec.fusion.walk import Walk
from arachnec.ir.nodes import GraphOp
from arachnec.ir.values import Value


@dataclass(frozen=True)
class Norm:
    """A norm as it stands in the graph: of ``x``, with what ``weight`` and ``bias`` it has."""

    x: str
    operands: dict[str, str]
    options: dict[str, Value]
    ops: int


def find_norm(walk: Walk, name: str) -> Norm | None:
    """The norm that makes ``name``: one operation, or the operations of its formula, with its vectors behind it."""
    name, casts = walk.uncast(name)
    norm = _single_op(walk, name) or _biased(walk, name) or _weighted(walk, name) or _written_out(walk, name)
    return None if norm is None else replace(norm, ops=norm.ops | casts)


def _single_op(walk: Walk, name: str) -> Norm | None:
    if (matched := walk.op(name, "layer_norm", "rms_norm")) is None:
        return None
    op, ops = matched
    shape = op.attrs.get("normalized_shape")
    kind = "layer" if stem(op) == "layer_norm" else "rms"
    eps = op.attrs.get("eps", 1e-5 if kind == "layer" else _smallest(walk, op))
    if not isinstance(shape, tuple) or len(shape) != 1:
        return None
    vectors = {}
    for role, vector in zip(("weight", "bias"), op.operands[1:], strict=False):
        vectors[role], more = walk.uncast(vector)
        ops |= more
    return Norm(op.operands[0], vectors, {"norm": kind, "eps": eps}, ops)


def _smallest(walk: Walk, op: GraphOp) -> float:
    """What torch adds where a model names no eps: the spacing of numbers at 1, in what is summed in."""
    return 2.0**-52 if walk.graph.dtypes.get(op.name) == "f64" else 2.0**-23


def _weighted(walk: Walk, name: str) -> Norm | None:
    """``norm(x) * weight``, with one weight for all rows."""
    matched = walk.op(name, "mul")
    for left, right in walk.pairs(matched[0]) if matched else ():
        weight, moves = _vector(walk, right, name)
        inner = find_norm(walk, left) if weight else None
        if matched and weight and inner is not None and not inner.operands:
            return replace(inner, operands={"weight": weight}, ops=inner.ops | matched[1] | moves)
    return None


def _biased(walk: Walk, name: str) -> Norm | None:
    """``norm(x) + bias``, or ``norm(x) * weight + bias`` in one operation, with one bias for all rows."""
    matched = walk.op(name, "add")
    for left, right in walk.pairs(matched[0]) if matched else ():
        bias, moves = _vector(walk, right, name)
        inner = find_norm(walk, left) if bias else None
        if matched and bias and inner is not None and "bias" not in inner.operands:
            return replace(inner, operands={**inner.operands, "bias": bias}, ops=inner.ops | matched[1] | moves)
    if walk.op(name, "addcmul") is None:
        return None
    for addend, left, right, ops in walk.multiply_add(name):
        (bias, moves), (weight, more) = _vector(walk, addend, name), _vector(walk, right, name)
        inner = find_norm(walk, left) if bias and weight else None
        if bias and weight and inner is not None and not inner.operands:
            return replace(inner, operands={"weight": weight, "bias": bias}, ops=inner.ops | ops | moves | more)
    return None


def _vector(walk: Walk, name: str, like: str) -> tuple[str | None, int]:
    """The vector [H] behind ``name``, which all rows of ``like`` share."""
    moved, ops = walk.vector(name)
    dims = walk.dims(moved)
    return (moved, ops) if len(dims) == 1 and dims == walk.dims(like)[-1:] else (None, 0)


def _written_out(walk: Walk, name: str) -> Norm | None:
    """``x / sqrt(mean(x^2) + eps)`` or ``(x - mean(x)) / sqrt(variance(x) + eps)``, or times the reciprocal root."""
    matched = walk.op(name, "mul", "div")
    if matched is None or len(matched[0].operands) != 2:
        return None
    orders = walk.pairs(matched[0]) if stem(matched[0]) == "mul" else [matched[0].operands]
    for x, factor in orders:
        radicand, ops = _under_root(walk, factor, inverse=stem(matched[0]) == "mul")
        inner, casts = walk.uncast(radicand)
        plus = walk.op(inner, "add")
        if plus is None or len(plus[0].operands) != 1 or type(eps := plus[0].attrs.get("other")) is not float:
            continue
        ops |= matched[1] | casts | plus[1]
        for kind in (_centered, _root_mean_square):  # what is centred is a mean square as well
            if (norm := kind(walk, x, plus[0].operands[0])) is not None:
                return replace(norm, options={**norm.options, "eps": eps}, ops=norm.ops | ops)
    return None


def _under_root(walk: Walk, name: str, *, inverse: bool) -> tuple[str, int]:
    """What ``name`` is the (inverse) root of, and the operations; an empty name if of nothing."""
    name, ops = walk.uncast(name)
    if inverse and (flipped := walk.op(name, "reciprocal")) is not None:
        name, casts = walk.uncast(flipped[0].operands[0])
        ops, inverse = ops | casts | flipped[1], False
    root = walk.op(name, "rsqrt" if inverse else "sqrt", "pow")
    if root is None or len(root[0].operands) != 1:
        return "", 0
    if stem(root[0]) == "pow" and root[0].attrs.get("exponent") != (-0.5 if inverse else 0.5):
        return "", 0
    return root[0].operands[0], ops | root[1]


def _root_mean_square(walk: Walk, x: str, radicand: str) -> Norm | None:
    source, casts = walk.uncast(x)
    square, ops = _mean(walk, radicand)
    squared, more = _square_root(walk, square)
    return Norm(x, {}, {"norm": "rms"}, ops | casts | more) if squared == source else None


def _centered(walk: Walk, x: str, radicand: str) -> Norm | None:
    """With the variance as ``var`` or as the mean of the squares of what the mean was taken from."""
    centered, casts = walk.uncast(x)
    minus = walk.op(centered, "sub")
    if minus is None or len(minus[0].operands) != 2:
        return None
    source, more = walk.uncast(minus[0].operands[0])
    averaged, ops = _mean(walk, minus[0].operands[1])
    ops |= casts | more | minus[1]
    inner, casts = walk.uncast(averaged)
    if not averaged or inner != source:
        return None
    ops |= casts
    name, casts = walk.uncast(radicand)
    if (spread := walk.op(name, "var")) is not None:
        of, more = walk.uncast(spread[0].operands[0])
        biased = spread[0].attrs.get("correction") == 0 or spread[0].attrs.get("unbiased") is False
        ops |= casts | spread[1] | more
        if of != source or not biased or not _over_rows(walk, spread[0]):
            return None
    else:
        square, more = _mean(walk, radicand)
        squared, rest = _square_root(walk, square)
        ops |= more | rest
        if squared != centered:
            return None
    return Norm(minus[0].operands[0], {}, {"norm": "layer"}, ops)


def _mean(walk: Walk, name: str) -> tuple[str, int]:
    """What ``name`` is the mean over each row of; an empty name if of nothing."""
    name, ops = walk.uncast(name)
    matched = walk.op(name, "mean")
    if matched is None or not _over_rows(walk, matched[0]):
        return "", 0
    return matched[0].operands[0], ops | matched[1]


def _over_rows(walk: Walk, op: GraphOp) -> bool:
    last = op.attrs.get("dim") in ((-1,), (len(walk.dims(op.name)) - 1,))
    return last and op.attrs.get("keepdim") is True


def _square_root(walk: Walk, name: str) -> tuple[str, int]:
    """What ``name`` is the square of; an empty name if of nothing."""
    name, ops = walk.uncast(name)
    matched = walk.op(name, "pow", "square", "mul")
    if matched is None:
        return "", 0
    op, bit = matched
    if stem(op) == "pow" and op.attrs.get("exponent") not in (2, 2.0):
        return "", 0
    if stem(op) == "mul" and len(op.operands) != 2:
        return "", 0
    inner = [walk.uncast(operand) for operand in op.operands]
    if len({source for source, _ in inner}) != 1:
        return "", 0
    return inner[0][0], ops | bit | inner[0][1] | inner[-1][1]
