"""How a tensor lies over a grid of ranks: which of its dimensions are cut, and where.

A dimension is a product of *factors*, outermost first. At most one factor of a tensor is cut along each axis of the
grid; every rank holds one range of it. So a frame's height keeps its cut when frames, height and width are flattened
to tokens: the dimension then has three factors, and the middle one is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile


@dataclass(frozen=True)
class Factor:
    """``size`` entries; cut along ``axis`` of the grid, the range of place ``i`` is ``[bounds[i], bounds[i + 1])``."""

    size: int
    axis: int | None = None
    bounds: tuple[int, ...] = ()

    def span(self, place: int) -> tuple[int, int]:
        return (0, self.size) if self.axis is None else (self.bounds[place], self.bounds[place + 1])


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class Layout:
    """The dimensions of a tensor and the ``grid`` of ranks. An axis that cuts no factor has equal copies."""

    dims: tuple[Dim, ...]
    grid: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(dim) for dim in self.dims)

    @property
    def factors(self) -> tuple[Factor, ...]:
        return tuple(factor for dim in self.dims for factor in dim)

    @property
    def axes(self) -> frozenset[int]:
        """The axes along which this tensor is cut."""
        return frozenset(factor.axis for factor in self.factors if factor.axis is not None)

    @property
    def ranks(self) -> int:
        return math.prod(self.grid)

    def places(self, index: int) -> tuple[int, ...]:
        """Where in the grid the rank at this index is."""
        places = []
        for size in reversed(self.grid):
            index, place = divmod(index, size)
            places.append(place)
        return tuple(reversed(places))

    def span(self, factor: Factor, index: int) -> tuple[int, int]:
        """What the rank at ``index`` holds of a factor."""
        return factor.span(0 if factor.axis is None else self.places(index)[factor.axis])

    def local_shape(self, index: int) -> tuple[int, ...]:
        return tuple(math.prod(end - first for first, end in self._spans(dim, index)) for dim in self.dims)

    def held(self, index: int) -> tuple[tuple[int, int], ...]:
        """The range of every factor that the rank at ``index`` holds."""
        return tuple(self._spans(self.factors, index))

    def _spans(self, dim: Dim, index: int) -> list[tuple[int, int]]:
        return [self.span(factor, index) for factor in dim]

    def without(self, axes: frozenset[int]) -> Layout:
        """With these axes no longer cut."""
        return self.changed(lambda factor: Factor(factor.size) if factor.axis in axes else factor)

    def with_bounds(self, axis: int, bounds: tuple[int, ...]) -> Layout:
        """With the factor of an axis cut elsewhere."""
        return self.changed(lambda factor: replace(factor, bounds=bounds) if factor.axis == axis else factor)

    def changed(self, change: Callable[[Factor], Factor]) -> Layout:
        return replace(self, dims=tuple(joined(change(factor) for factor in dim) for dim in self.dims))

    def factor_of(self, axis: int) -> Factor:
        return next(factor for factor in self.factors if factor.axis == axis)

    def with_dim(self, position: int, dim: Dim) -> Layout:
        return replace(self, dims=(*self.dims[:position], dim, *self.dims[position + 1 :]))


def size_of(dim: Dim) -> int:
    return math.prod(factor.size for factor in dim)


def whole(size: int) -> Dim:
    return () if size == 1 else (Factor(size),)


def is_cut(dim: Dim) -> bool:
    return any(factor.axis is not None for factor in dim)


def joined(factors: Iterator[Factor] | Sequence[Factor]) -> Dim:
    """The same dimension with as few factors as say it."""
    dim: list[Factor] = []
    for factor in factors:
        if factor.axis is None and factor.size == 1:
            continue
        if dim and dim[-1].axis is None and factor.axis is None:
            dim[-1] = Factor(dim[-1].size * factor.size)
        else:
            dim.append(factor)
    return tuple(dim)


def even_bounds(size: int, places: int) -> tuple[int, ...]:
    return tuple(size * place // places for place in range(places + 1))


def has_empty(factor: Factor) -> bool:
    return any(first == end for first, end in pairwise(factor.bounds))


@dataclass(frozen=True)
class Unaligned(Exception):
    """A view cuts through what a rank holds: of ``axis`` its bounds would have to be multiples of ``multiple``, or,
    where that is 0, it cannot be cut at all."""

    axis: int
    multiple: int


def viewed(layout: Layout, shape: Sequence[int]) -> Layout:
    """The layout after a view as ``shape``. Raises ``Unaligned`` for the axis that is in the way.

    A tensor without entries keeps the cuts of the leading dimensions that stay as they are: nothing is in the way.
    """
    if 0 in shape:
        same = sum(1 for _ in takewhile(lambda sizes: sizes[0] == sizes[1], zip(layout.shape, shape, strict=False)))
        return replace(layout, dims=(*layout.dims[:same], *map(whole, shape[same:])))
    rest = list(reversed(joined(layout.factors)))
    dims: list[Dim] = []
    for size in shape:
        dim: list[Factor] = []
        left = size
        while left > 1:
            factor = rest.pop()
            if left % factor.size == 0:
                dim.append(factor)
                left //= factor.size
                continue
            # the last factor of this dimension is the outer part of one that the next dimensions share
            outer, inner = _divided(factor, left, rest)
            dim.append(outer)
            rest.append(inner)
            left = 1
        dims.append(_merged(joined(dim)))
    for factor in rest:  # of one entry, which one rank has, and no size tells in which dimension it is now
        if factor.axis is not None:
            raise Unaligned(factor.axis, 0)
    return replace(layout, dims=tuple(dims))


def _merged(dim: Dim) -> Dim:
    """Whole entries of a part are a longer part: heads that are cut, flattened with what is in a head."""
    if len(dim) < 2 or dim[-1].axis is not None or dim[-2].axis is None:
        return dim
    *outer, cut, inner = dim
    bounds = tuple(bound * inner.size for bound in cut.bounds)
    return (*outer, Factor(cut.size * inner.size, cut.axis, bounds))


def _divided(factor: Factor, outer: int, rest: Sequence[Factor]) -> tuple[Factor, Factor]:
    if factor.size % outer:
        cut = next((other.axis for other in (factor, *reversed(rest)) if other.axis is not None), None)
        assert cut is not None, "the shapes of a view have as many entries"
        raise Unaligned(cut, 0)
    inner = factor.size // outer
    if factor.axis is None:
        return Factor(outer), Factor(inner)
    if any(bound % inner for bound in factor.bounds):
        raise Unaligned(factor.axis, inner)
    return Factor(outer, factor.axis, tuple(bound // inner for bound in factor.bounds)), Factor(inner)
