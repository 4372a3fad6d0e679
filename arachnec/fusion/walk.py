"""Walking a region of a graph from its end: what patterns are made of.

Casts and views of the per-sample vectors are looked through. What a kernel calls its arguments is written down.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import sympy

from arachnec.fusion.graph import FusionGraph, stem
from arachnec.ir.nodes import GraphOp
from arachnec.ir.values import Value

CASTS = ("to", "_to_copy", "type_as", "float", "half", "bfloat16")
NEUTRAL = {"div": 1, "mul": 1, "add": 0, "sub": 0}  # the second operand that changes nothing
COPIES = ("clone", "contiguous", "copy")
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
        """The value before casts, copies, and arithmetic that changes nothing, inside the region."""
        ops = 0
        while (matched := self.op(name, *CASTS, *COPIES, *NEUTRAL)) is not None and _is_idle(matched[0]):
            name, ops = matched[0].operands[0], ops | matched[1]
        return name, ops

    def vector(self, name: str) -> tuple[str, int]:
        """The value before casts and moves inside the region that keep all of it."""
        count = self.graph.sizes.count(name)
        ops = 0
        while (matched := self.op(name, *CASTS, *COPIES, *NEUTRAL, *MOVES)) is not None and _is_idle(matched[0]):
            before = matched[0].operands[0]
            if self.graph.sizes.count(before) != count:
                break
            name, ops = before, ops | matched[1]
        return name, ops

    def pairs(self, op: GraphOp) -> Iterator[tuple[str, str]]:
        """The two operands of a sum or product, in both orders."""
        if len(op.operands) == 2 and op.attrs.get("alpha", 1) == 1:
            yield op.operands[0], op.operands[1]
            yield op.operands[1], op.operands[0]

    def multiply_add(self, name: str) -> Iterator[tuple[str, str, str, int]]:
        """(c, a, b) of ``c + a * b``, in every order, as a sum of a product or in one operation."""
        if (matched := self.op(name, "addcmul")) is not None and matched[0].attrs.get("value", 1) == 1:
            addend, *factors = matched[0].operands
            for a, b in (factors, factors[::-1]) if len(factors) == 2 else ():
                yield addend, a, b, matched[1]
        total = self.op(name, "add")
        for side, addend in self.pairs(total[0]) if total else ():
            product, casts = self.uncast(side)
            times = self.op(product, "mul")
            for a, b in self.pairs(times[0]) if total and times else ():
                yield addend, a, b, total[1] | casts | times[1]  # type: ignore[index]

    def one_plus(self, name: str) -> tuple[str, int] | None:
        """s of ``1 + s``, however it is moved."""
        moved, ops = self.vector(name)
        matched = self.op(moved, "add")
        if matched is None or len(matched[0].operands) != 1 or matched[0].attrs.get("other") != 1:
            return None
        inner, more = self.vector(matched[0].operands[0])
        return inner, ops | matched[1] | more

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


def _is_idle(op: GraphOp) -> bool:
    """Whether an operation that is arithmetic by its name gives back what it is given, but for the dtype."""
    if stem(op) not in NEUTRAL:
        return True
    return len(op.operands) == 1 and op.attrs.get("other") == NEUTRAL[stem(op)] and "rounding_mode" not in op.attrs


def same_dtype(walk: Walk, name: str, like: str) -> tuple[str | None, int]:
    """``name``, or the next it is a cast of, in the dtype of ``like``: kernels return the dtype that they are given."""
    ops = 0
    while walk.graph.dtypes.get(name) != walk.graph.dtypes.get(like):
        if (cast := walk.op(name, *CASTS)) is None:
            return None, 0
        name, ops = cast[0].operands[0], ops | cast[1]
    while (matched := walk.op(name, *COPIES, *NEUTRAL)) is not None and _is_idle(matched[0]):
        name, ops = matched[0].operands[0], ops | matched[1]
    return name, ops
