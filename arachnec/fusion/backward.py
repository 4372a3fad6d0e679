"""Bytes that a backward moves and saves: of single operations, as autograd runs them, and of a fused region.

A single operation reads its result's gradient and what it has saved, and writes a gradient per floating-point operand.
A product with a smaller operand also writes the full product and reduces it; a sum with one reads the gradient again.
A region reads the gradients of its results and its inputs, and writes the gradients of its inputs.
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
    saved: Size


class Traffic(Protocol):
    """Which values regions of ``graph`` read and write."""

    @property
    def graph(self) -> FusionGraph: ...

    def results_of(self, i: int) -> list[str]:
        """The tensors that an operation writes."""

    def loaded(self, region: int) -> list[str]:
        """The values that a region reads."""

    def written(self, region: int) -> list[str]:
        """The results of a region that are read outside it."""


def alone(traffic: Traffic, region: int, size: Callable[[str], Size]) -> Backward:
    """Every operation of the region by itself; ``size`` gives the bytes of a value.

    A tensor that several operations save counts once.
    """
    graph = traffic.graph
    moved: Size = 0
    saved: dict[str, Size] = {}
    for i in bits(region & graph.core):
        op = graph.ops[i]
        result = sum(size(name) for name in traffic.results_of(i))
        operands = [name for name in values_read(op) if name in graph.sizes.shapes]
        saved_operands = operands if stem(op) in BOTH else operands[:1] if stem(op) in ONE else []
        largest = max((graph.sizes.at(graph.sizes.count(name)) for name in operands), default=0.0)
        moved += result
        for name in saved_operands:
            moved += size(name)
            saved[graph.base(name)] = size(graph.base(name))
        for name in operands:
            smaller = graph.sizes.at(graph.sizes.count(name)) < largest
            if smaller and graph.kinds[i] is Kind.POINTWISE:
                moved += size(name) + (2 * result if stem(op) in BOTH else result)
            else:
                moved += size(name)
    return Backward(moved, sum(saved.values()))


def together(traffic: Traffic, region: int, size: Callable[[str], Size]) -> Backward:
    """The region as one pass, which recomputes everything between its inputs and its results."""
    results = sum(size(name) for name in traffic.written(region))
    inputs = sum(size(name) for name in traffic.loaded(region) if name in traffic.graph.sizes.shapes)
    return Backward(results + 2 * inputs, inputs)
