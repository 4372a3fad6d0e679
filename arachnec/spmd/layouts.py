"""Layouts: how a tensor's dimensions are distributed over the ranks of one sequence.

A dimension without a layout is the same on every rank. A layout is a concatenation of parts, at least one of them
sharded: a rank holds its own tokens of a sharded part and all of a replicated one. Which tokens are its own follows
from the part's length: those of the cascade where it is the clip's sequence, else an even share (frames, or places).
Lengths are symbolic and compared as polynomials, never as numbers: a caption may be as long as a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
from torch import fx

Size: TypeAlias = sympy.Expr


@dataclass(frozen=True)
class Part:
    """A run of ``length`` positions of one dimension; a rank holds its own of them if ``sharded``, else all."""

    length: Size
    sharded: bool


@dataclass(frozen=True)
class Layout:
    """One dimension as ``outer x (parts, one after the other) x inner``, flattened.

    ``outer`` and ``inner`` are 1 unless the token dimension was merged with its neighbours (batch * tokens).
    """

    parts: tuple[Part, ...]
    outer: Size = sympy.S.One
    inner: Size = sympy.S.One

    @property
    def length(self) -> Size:
        """Positions of all parts, over all ranks."""
        return total(part.length for part in self.parts)

    @property
    def size(self) -> Size:
        """Size of the dimension over all ranks."""
        return sympy.expand(self.outer * self.length * self.inner)

    @property
    def pure(self) -> bool:
        """One sharded part and nothing else."""
        return len(self.parts) == 1 and not self.merged

    @property
    def merged(self) -> bool:
        return not (same(self.outer, sympy.S.One) and same(self.inner, sympy.S.One))

    @property
    def alone(self) -> bool:
        """One sharded part, merged with neighbours or not: its positions can be dealt out in another way."""
        return len(self.parts) == 1

    def local(self, share: Callable[[Size], Size]) -> Size:
        """Size of the dimension on a rank with ``share(length)`` of each sharded part of that length."""
        length = total(share(part.length) if part.sharded else part.length for part in self.parts)
        return sympy.expand(self.outer * length * self.inner)

    def bounds(self) -> list[Size]:
        """The cumulative lengths at which one part ends and the next begins, 0 and the whole length included."""
        ends: list[Size] = [sympy.S.Zero]
        for part in self.parts:
            ends.append(sympy.expand(ends[-1] + part.length))
        return ends

    def between(self, start: Size, end: Size) -> tuple[tuple[Part, ...], tuple[Part, ...]] | None:
        """The parts before ``start``, and those from there to ``end``; None where these are no bounds of parts."""
        bounds = self.bounds()
        first = next((i for i, bound in enumerate(bounds) if same(bound, start)), None)
        last = next((i for i in reversed(range(len(bounds))) if same(bounds[i], end)), None)
        if first is None or last is None or first > last:
            return None
        return self.parts[:first], self.parts[first:last]


@dataclass(frozen=True)
class Value:
    """A tensor of the rewritten graph: its node, its sizes over all ranks, and the layout of each dimension."""

    node: fx.Node
    sizes: tuple[Size, ...]
    layouts: tuple[Layout | None, ...]
    itemsize: int

    @property
    def sharded(self) -> bool:
        return any(self.layouts)

    @property
    def bytes(self) -> Size:
        return sympy.expand(product(self.sizes) * self.itemsize)


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    return bool(a == b) or bool(sympy.expand(a - b) == 0)


def total(sizes: Iterable[Size]) -> Size:
    return sympy.expand(sum(sizes, sympy.S.Zero))


def product(sizes: Iterable[Size]) -> Size:
    return sympy.expand(math.prod(sizes, start=sympy.S.One))


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` where that is a polynomial, else None."""
    if same(a, b):
        return sympy.S.One
    ratio = sympy.cancel(a / b)
    return sympy.expand(ratio) if sympy.fraction(ratio)[1] == 1 else None


def alike(a: Layout, b: Layout) -> bool:
    """Whether two layouts put the same positions on every rank, however replicated neighbours are cut."""
    if not (same(a.outer, b.outer) and same(a.inner, b.inner)):
        return False
    left, right = _merged_parts(a.parts), _merged_parts(b.parts)
    return len(left) == len(right) and all(
        p.sharded == q.sharded and same(p.length, q.length) for p, q in zip(left, right, strict=True)
    )


def _merged_parts(parts: Sequence[Part]) -> list[Part]:
    merged: list[Part] = []
    for part in parts:
        if merged and not part.sharded and not merged[-1].sharded:
            merged[-1] = Part(sympy.expand(merged[-1].length + part.length), sharded=False)
        else:
            merged.append(part)
    return merged


def layout_of(parts: tuple[Part, ...]) -> Layout | None:
    """The layout of a dimension made of ``parts``: None where none of them is sharded."""
    return Layout(parts) if any(part.sharded for part in parts) else None
