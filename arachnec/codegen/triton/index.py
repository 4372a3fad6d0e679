"""Where an element lies, as a sum of multiples of coordinates: what views do to an index, exactly.

Coordinates count the rows (of sizes that clips change: symbols) and the lanes of a row. Lanes are split so finely that
every shape of a region is a product of neighbouring ones: 40 heads of 128 whose pairs are rotated are 40 x 64 x 2. Then
reshapes, slices and joins only add, multiply and divide without remainder.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

Size = Any  # an int, or a sympy expression of positive integers


class Unsupported(Exception):
    """A region that the templates do not cover; the message says what of it."""


class Cut(Exception):
    """Rows before ``position`` of a coordinate are made otherwise than those from there on."""

    def __init__(self, coordinate: int, position: Size) -> None:
        super().__init__(f"coordinate {coordinate} at {position}")
        self.coordinate, self.position = coordinate, position


def tidy(size: Size) -> Size:
    """An expression in its one form: an int where it is a number."""
    if isinstance(size, int):
        return size
    size = sympy.expand(size)
    return int(size) if size.is_Integer else size


def exact(size: Size, divisor: Size) -> Size | None:
    """The quotient, or None where it is not known to be whole."""
    if isinstance(size, int) and isinstance(divisor, int):
        return None if size % divisor else size // divisor
    return _exact(size, divisor)


@functools.lru_cache(maxsize=4096)
def _exact(size: Size, divisor: Size) -> Size | None:
    if size == 0 or size == divisor:
        return int(size != 0)
    quotient = sympy.cancel(sympy.sympify(size) / divisor)
    symbols = sorted(quotient.free_symbols, key=str)
    if not quotient.is_polynomial(*symbols):
        return None
    coefficients = sympy.Poly(quotient, *symbols).coeffs() if symbols else [quotient]
    return tidy(quotient) if all(c.is_Integer for c in coefficients) else None


def at_least(size: Size, least: Size) -> bool:
    """Whether ``size >= least`` whatever the sizes are, each at least 1."""
    return _not_negative(tidy(size - least))


@functools.lru_cache(maxsize=4096)
def _not_negative(difference: Size) -> bool:
    if isinstance(difference, int):
        return difference >= 0
    symbols = sorted(difference.free_symbols, key=str)
    if not difference.is_polynomial(*symbols):
        return False
    moved = difference.subs({s: s + 1 for s in symbols}, simultaneous=True)
    return all(c >= 0 for c in sympy.Poly(moved, *symbols).coeffs())


@dataclass(frozen=True)
class Space:
    """Coordinates of a kernel's elements: the first ``leads`` count rows, the others are lanes, outermost first.

    The last ``inner`` lanes are the second axis of a tile, those before them the first. ``lane``: the row coordinate
    that lies along a tile instead, where a row's width is known only at run time.
    """

    sizes: tuple[Size, ...]
    leads: int
    inner: int
    lane: int | None = None

    @property
    def lanes(self) -> tuple[int, ...]:
        return self.sizes[self.leads :]

    @property
    def first_inner(self) -> int:
        return len(self.sizes) - self.inner

    @property
    def outer_size(self) -> int:
        return math.prod(self.sizes[self.leads : self.first_inner])

    @property
    def inner_size(self) -> int:
        """Of a row of fixed width."""
        return math.prod(self.sizes[self.first_inner :])

    @property
    def zero(self) -> Index:
        return Index((0,) * len(self.sizes), 0)

    def coordinate(self, number: int) -> Index:
        return Index(tuple(int(k == number) for k in range(len(self.sizes))), 0)

    def split(self, dims: Sequence[int]) -> list[Index]:
        """The index of every element of a row of shape ``dims``, one for each dimension."""
        steps = [math.prod(self.sizes[k + 1 :]) if k >= self.leads else 0 for k in range(len(self.sizes))]
        flat = Index(tuple(step if size != 1 else 0 for step, size in zip(steps, self.sizes, strict=True)), 0)
        return flat.divided(self, dims)


@dataclass(frozen=True)
class Index:
    """sum(factors[i] * coordinate i) + offset."""

    factors: tuple[Size, ...]
    offset: Size

    def __mul__(self, factor: Size) -> Index:
        return Index(tuple(tidy(factor * f) for f in self.factors), tidy(factor * self.offset))

    def __add__(self, other: Index | Size) -> Index:
        if not isinstance(other, Index):
            return Index(self.factors, tidy(self.offset + other))
        factors = tuple(tidy(a + b) for a, b in zip(self.factors, other.factors, strict=True))
        return Index(factors, tidy(self.offset + other.offset))

    @property
    def used(self) -> frozenset[int]:
        return frozenset(i for i, factor in enumerate(self.factors) if factor != 0)

    def last(self, space: Space) -> Size:
        """The largest value."""
        steps = zip(self.factors, space.sizes, strict=True)
        return tidy(self.offset + sum(factor * (size - 1) for factor, size in steps if factor != 0))

    def within(self, space: Space, size: Size) -> bool:
        """Whether it is in [0, size) everywhere."""
        return at_least(self.offset, 0) and at_least(size - 1, self.last(space))

    def quotient(self, space: Space, divisor: Size) -> tuple[Index, Index]:
        """Quotient and remainder. Raises ``Unsupported`` where they are no sums of coordinates."""
        if divisor == 1:
            return self, space.zero
        parts = [exact(factor, divisor) for factor in self.factors]
        above, below = _divided_offset(self.offset, divisor)
        remainder = Index(tuple(f if q is None else 0 for f, q in zip(self.factors, parts, strict=True)), below)
        if not at_least(divisor - 1, remainder.last(space)):
            raise Unsupported("it cuts a row where no dimension of another shape ends")
        return Index(tuple(q or 0 for q in parts), above), remainder

    def divided(self, space: Space, dims: Sequence[Size]) -> list[Index]:
        """A flat index as one for each dimension; the first that is not 1 takes what is left."""
        indices = [space.zero] * len(dims)
        real = [dim for dim, size in enumerate(dims) if size != 1]
        rest = self
        for dim in reversed(real[1:]):
            rest, indices[dim] = rest.quotient(space, dims[dim])
        if real:
            indices[real[0]] = rest
        return indices


def _divided_offset(offset: Size, divisor: Size) -> tuple[Size, Size]:
    if isinstance(offset, int) and isinstance(divisor, int):
        return divmod(offset, divisor)
    above, below = 0, 0
    for term in sympy.Add.make_args(sympy.sympify(offset)):
        quotient = exact(tidy(term), divisor)
        above, below = (above + quotient, below) if quotient is not None else (above, below + term)
    return tidy(above), tidy(below)


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


def lane_terms(axis: str, sizes: list[int], factors: list[Size]) -> list[str]:
    """The part of an index that comes from one axis of a tile."""
    steps = [math.prod(sizes[k + 1 :]) if size > 1 else 0 for k, size in enumerate(sizes)]
    scale = next((f // s for f, s in zip(factors, steps, strict=True) if s), 0)
    if scale and [scale * s for s in steps] == factors:
        return [axis if scale == 1 else f"{scale} * {axis}"]
    terms = []
    for k, factor in enumerate(factors):
        if factor:
            lane = axis if steps[k] == 1 else f"{axis} // {steps[k]}"
            lane = lane if k == 0 else f"({lane}) % {sizes[k]}"
            terms.append(f"({lane})" if factor == 1 else f"{factor} * ({lane})")
    return terms
