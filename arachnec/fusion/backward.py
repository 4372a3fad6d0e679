"""What the backward of operations moves and what is kept for it: alone, as autograd runs them, and as one region.

Counted, by these rules: an operation alone reads its result's gradient and what it kept, and writes a gradient as large
as each of its operands that is one; a product with a smaller operand makes the whole product and adds it up, and a sum
with one reads the gradient again. A region reads its results' gradients and its inputs, and writes theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from arachnec.fusion.graph import FusionGraph, bits
from arachnec.fusion.ops import Kind, stem, values_read

BOTH = ("mul", "div", "addcmul", "lerp", "where", "maximum", "minimum", "atan2")  # keep their operands
_ONE = """layer_norm rms_norm native_layer_norm gelu silu tanh sigmoid exp rsqrt sqrt pow log sin cos erf relu softplus
    reciprocal softmax _softmax elu leaky_relu abs var"""
ONE = frozenset(_ONE.split())  # keep one tensor of the operand's size

Size = Any  # a number, or an expression of the graph's symbols


@dataclass(frozen=True)
class Backward:
    """Bytes: read and written, and kept from the forward."""

    moved: Size
    kept: Size


class Traffic(Protocol):
    """Which values regions of ``graph`` read and write."""

    @property
    def graph(self) -> FusionGraph: ...

    def made(self, i: int) -> list[str]:
        """The tensors that an operation makes."""

    def loaded(self, region: int) -> list[str]:
        """The values that a region reads."""

    def written(self, region: int) -> list[str]:
        """What a region makes that is read outside it."""


def alone(traffic: Traffic, region: int, size: Callable[[str], Size]) -> Backward:
    """Every operation of the region by itself; ``size`` gives the bytes of a value.

    What several operations keep is kept once.
    """
    graph = traffic.graph
    moved: Size = 0
    kept: dict[str, Size] = {}
    for i in bits(region & graph.core):
        op = graph.ops[i]
        made = sum(size(name) for name in traffic.made(i))
        operands = [name for name in values_read(op) if name in graph.sizes.shapes]
        saved = operands if stem(op) in BOTH else operands[:1] if stem(op) in ONE else []
        largest = max((graph.sizes.at(graph.sizes.count(name)) for name in operands), default=0.0)
        moved += made
        for name in saved:
            moved += size(name)
            kept[graph.base(name)] = size(graph.base(name))
        for name in operands:
            smaller = graph.sizes.at(graph.sizes.count(name)) < largest
            if smaller and graph.kinds[i] is Kind.POINTWISE:
                moved += size(name) + (2 * made if stem(op) in BOTH else made)
            else:
                moved += size(name)
    return Backward(moved, sum(kept.values()))


def together(traffic: Traffic, region: int, size: Callable[[str], Size]) -> Backward:
    """The region as one pass, which computes again what stands between its inputs and its results."""
    results = sum(size(name) for name in traffic.written(region))
    inputs = sum(size(name) for name in traffic.loaded(region) if name in traffic.graph.sizes.shapes)
    return Backward(results + 2 * inputs, inputs)
