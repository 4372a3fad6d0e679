"""Where an element lies in a row, as a sum of multiples of lanes: what views do to an index, exactly.

The lanes of a row are split so finely that every shape of a region is a product of neighbouring ones: 40 heads of 128
whose pairs are turned are 40 x 64 x 2. Then reshapes, slices and joins only add, multiply and divide without remainder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Unsupported(Exception):
    """A region that the templates do not cover; the message says what of it."""


@dataclass(frozen=True)
class Lanes:
    """Sizes of the finest parts of a row, outermost first; the last ``inner`` of them are the second axis of a tile."""

    sizes: tuple[int, ...]
    inner: int

    @property
    def outer_size(self) -> int:
        return math.prod(self.sizes[: len(self.sizes) - self.inner])

    @property
    def inner_size(self) -> int:
        return math.prod(self.sizes[len(self.sizes) - self.inner :])

    def stride(self, lane: int) -> int:
        return math.prod(self.sizes[lane + 1 :])

    def split(self, dims: Sequence[int]) -> list[Index]:
        """The index of every element of a row of shape ``dims``, one for each dimension."""
        whole = Index(tuple(self.stride(i) if size > 1 else 0 for i, size in enumerate(self.sizes)), 0)
        return whole.divided(self, dims)


@dataclass(frozen=True)
class Index:
    """sum(factors[i] * lane i) + offset."""

    factors: tuple[int, ...]
    offset: int

    def __mul__(self, factor: int) -> Index:
        return Index(tuple(factor * f for f in self.factors), factor * self.offset)

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.factors, self.offset + other)
        return Index(tuple(a + b for a, b in zip(self.factors, other.factors, strict=True)), self.offset + other.offset)

    @property
    def used(self) -> frozenset[int]:
        return frozenset(i for i, factor in enumerate(self.factors) if factor)

    def quotient(self, lanes: Lanes, divisor: int) -> tuple[Index, Index]:
        """Quotient and remainder. Raises ``Unsupported`` where they are no sums of lanes."""
        if divisor == 1:
            return self, Index((0,) * len(self.factors), 0)
        rest = tuple(f if f % divisor else 0 for f in self.factors)
        remainder = Index(rest, self.offset % divisor)
        largest = remainder.offset + sum(f * (lanes.sizes[i] - 1) for i, f in enumerate(rest))
        if largest >= divisor or any(f < 0 for f in rest):
            raise Unsupported("it cuts a row where no dimension of another shape ends")
        whole = tuple(0 if f % divisor else f // divisor for f in self.factors)
        return Index(whole, self.offset // divisor), remainder

    def divided(self, lanes: Lanes, dims: Sequence[int]) -> list[Index]:
        """A flat index as one for each dimension."""
        found: list[Index] = []
        rest = self
        for size in reversed(dims):
            rest, part = rest.quotient(lanes, size) if size > 1 else (rest, Index((0,) * len(self.factors), 0))
            found.append(part)
        return found[::-1]


def finest(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The parts that all shapes of equally many elements, and shapes that are parts of these, are products of."""
    ends = {1}
    for shape in shapes:
        size = 1
        for dim in reversed(shape):
            size *= dim
            ends.add(size)
    ordered = sorted(ends)
    if any(b % a for a, b in itertools.pairwise(ordered)):
        raise Unsupported(f"its rows are cut at {ordered}, which do not divide each other")
    return tuple(b // a for a, b in itertools.pairwise(ordered))[::-1] or (1,)
