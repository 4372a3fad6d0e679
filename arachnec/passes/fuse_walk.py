"""Walking a region of a graph from its end: what patterns are made of, and norms, whole or written out.

Casts and views of the per-sample vectors are looked through. What a kernel calls its arguments is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import sympy

from arachnec.ir.nodes import GraphOp
from arachnec.ir.values import Value
from arachnec.passes.fuse_graph import FusionGraph
from arachnec.passes.fuse_ops import stem

CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
MOVES = ("unsqueeze", "squeeze", "slice", "reshape", "view", "expand")  # of a vector: not of the tokens


@dataclass(frozen=True)
class Match:
    """``kernel`` computes ``results`` (role to value name) of ``operands``; ``options`` are its numbers.

    ``ops`` are the operations it stands for, views between them included. ``splits``: the linear layer that leaves its
    bias to the kernel.
    """

    kernel: str
    results: dict[str, str]
    operands: dict[str, str]
    options: dict[str, Value] = field(default_factory=dict)
    ops: int = 0
    splits: str = ""


@dataclass(frozen=True)
class Norm:
    """A norm as it stands in the graph: of ``x``, with what ``weight`` and ``bias`` it has."""

    x: str
    operands: dict[str, str]
    options: dict[str, Value]
    ops: int


@dataclass(frozen=True)
class Walk:
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

    def one_kind(self, rows: tuple[sympy.Expr, ...], *vectors: str) -> bool:
        """Whether vectors are all for all rows [H], per sample [B, H] or per token: what the kernels take."""
        kinds = set()
        for vector in vectors:
            *lead, last = self.dims(vector) or (None,)
            while lead and lead[-1] == 1:
                lead.pop()
            if last != rows[-1] or len(lead) >= len(rows) or tuple(lead) != rows[: len(lead)]:
                return False
            kinds.add(len(lead))
        return len(kinds - {0}) <= 1

    def dims(self, name: str) -> tuple[sympy.Expr, ...]:
        return self.graph.sizes.shapes.get(name, ())


def find_norm(walk: Walk, name: str) -> Norm | None:
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
        return Norm(op.operands[0], vectors, {"norm": kind, "eps": eps}, ops)
    if (found := walk.op(name, "mul")) is None:
        return None
    for left, right in walk.pairs(found[0]):
        if (root := _root_mean_square(walk, left, right)) is not None:
            return replace(root, ops=root.ops | casts | found[1])
        weight_is_vector = len(walk.dims(right)) == 1
        inner = find_norm(walk, left) if weight_is_vector else None
        if inner is not None and inner.options["norm"] == "rms" and not inner.operands:
            return Norm(inner.x, {"weight": right}, inner.options, inner.ops | casts | found[1])
    return None


def _root_mean_square(walk: Walk, x: str, factor: str) -> Norm | None:
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
    return Norm(x, {}, {"norm": "rms", "eps": eps}, ops | casts) if type(eps) is float else None


def same_dtype(walk: Walk, name: str, like: str) -> tuple[str | None, int]:
    """``name``, or the next it is a cast of, in the dtype of ``like``: kernels return the dtype that they are given."""
    ops = 0
    while walk.graph.dtypes.get(name) != walk.graph.dtypes.get(like):
        if (cast := walk.op(name, *CASTS)) is None:
            return None, 0
        name, ops = cast[0].operands[0], ops | cast[1]
    return name, ops
