"""How a clip's grid is cut into cubes, on plain numbers: where they start on each axis, and how many there are.

In: the grid and the asked-for tokens of a group, a block and a cell. Out: cubes of three sizes, each within one of the
next larger. They follow from these numbers alone, in integers and in products that every machine rounds alike, so all
ranks, a plan and a run know the same.

A cube is computed in whole tiles, and places without a token are computed for nothing. So the sides are those with the
largest share of filled places for their shape. docs/sparse_attention.md has tables.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Grid = tuple[int, int, int]  # frames, height, width, in tokens
Starts = tuple[int, ...]  # of cubes on an axis, and the end of the last
Axes = tuple[Starts, ...]
VERSION = 2  # of the rule below; lists of blocks are of one rule
CELL = 8  # tokens of a cell, at most: the usual size
FRAME = 2  # a frame is as far away as so many tokens in height or width


@dataclass(frozen=True)
class GridCut:
    """By axis where cubes start: of the larger of group and block, of the smaller, and of cells."""

    large: Axes
    small: Axes
    cells: Axes


@functools.lru_cache(maxsize=1024)
def cut_grid(grid: Grid, queries: int, keys: int, cell: int) -> GridCut:
    """The best filled cut whose groups and blocks have more than half of the asked-for tokens.

    In no size less filled than ``doubled_cut``, which it is where none is better; of cells those of usual size. So
    groups and blocks do not depend on the size of a cell.
    """
    large, small = max(queries, keys), min(queries, keys)
    usual = min(CELL, small)
    doubled = doubled_cut(grid, queries, keys, usual)
    for inner, outer in _best_first(grid, large, small, doubled):
        parts = tuple(_even(length, -(-length // side)) for length, side in zip(grid, inner, strict=True))
        if cubes_in(_cells(parts, usual)) <= cubes_in(doubled.cells):
            return GridCut(tuple(map(_runs, parts, outer)), parts, _cells(parts, cell))
    return doubled if cell == usual else doubled_cut(grid, queries, keys, cell)


def doubled_cut(grid: Grid, queries: int, keys: int, cell: int) -> GridCut:
    """Sides that are powers of two, as even as the grid lets them be; each cube is cut into the next smaller ones."""
    sides = [cube_of(size, grid) for size in (max(queries, keys), min(queries, keys), cell)]
    axes = []
    for axis, length in enumerate(grid):
        levels: list[Starts] = [(0, length)]
        for side in sides:
            levels.append(_within(levels[-1], side[axis]))
        axes.append(levels[1:])
    large, small, cells = (tuple(levels[number] for levels in axes) for number in range(3))
    return GridCut(large, small, cells)


def cube_of(tokens: int, grid: Grid) -> Grid:
    """The sides of a cube of at most so many tokens, as even as the grid lets it be: width and height grow first."""
    sides = [1, 1, 1]
    while True:
        growing = [axis for axis in range(3) if sides[axis] < grid[axis]]
        if not growing or 2 * math.prod(sides) > tokens:
            return sides[0], sides[1], sides[2]
        sides[min(growing, key=lambda axis: (sides[axis], -axis))] *= 2


def group_count(grid: Grid, queries: int, keys: int) -> int:
    """How many groups of at most ``queries`` tokens there are, where blocks of ``keys`` lie within them or around."""
    return cube_counts(grid, queries, keys)[0]


def cube_counts(grid: Grid, queries: int, keys: int) -> tuple[int, int]:
    """How many groups there are, and how many blocks of video."""
    axes = cut_grid(grid, queries, keys, min(CELL, queries, keys))
    large, small = cubes_in(axes.large), cubes_in(axes.small)
    return (large, small) if queries >= keys else (small, large)


def cubes_in(axes: Axes) -> int:
    return math.prod(len(starts) - 1 for starts in axes)


def places_in(axes: Axes, tile: int) -> int:
    """With and without a token: every cube has as many tiles as the largest needs."""
    return _places(cubes_in(axes), math.prod(_longest(starts) for starts in axes), tile)


def cut(first: int, end: int, side: int) -> Iterator[tuple[int, int]]:
    """As few parts as hold at most ``side`` places each, and as even as they can be."""
    count = -(-(end - first) // side)
    for part in range(count):
        yield first + (end - first) * part // count, first + (end - first) * (part + 1) // count


def _best_first(grid: Grid, large: int, small: int, doubled: GridCut) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Sides of the smaller cubes, and how many larger ones there are on each axis; the best filled for their shape.

    Those that fill less than the doubled cut in one of the two sizes are none of them.
    """
    most_small, most_large = (places_in(axes, small) for axes in (doubled.small, doubled.large))
    ranked = []
    for inner in _boxes(grid, small, small):
        counts = tuple(-(-length // side) for length, side in zip(grid, inner, strict=True))
        volume = math.prod(inner)
        of_small = _places(math.prod(counts), volume, small)
        if of_small > most_small:
            continue
        for times in _boxes(counts, large // volume, large / volume):
            runs = tuple(-(-count // many) for count, many in zip(counts, times, strict=True))
            sides = tuple(map(_longest_run, grid, counts, runs))
            of_large = _places(math.prod(runs), math.prod(sides), small)
            if of_large <= most_large:
                worth = 1.0 / (of_small * of_large)
                worth = worth * worth * worth * _compact(inner, grid) * _compact(sides, grid)
                ranked.append((-worth, max(inner), max(sides), inner, runs))
    return [(inner, runs) for *_, inner, runs in sorted(ranked)]


def _boxes(lengths: Sequence[int], most: int, asked: float) -> Iterator[tuple[int, ...]]:
    """Sides that cut these lengths evenly, of at most so many places and of more than half of the asked-for ones."""
    first, second, third = ([side for side in range(1, min(n, most) + 1) if _is_even(n, side)] for n in lengths)
    for a, b in itertools.product(first, second):
        for c in third:
            if a * b * c > most:
                break
            if 2 * a * b * c > asked or (a, b, c) == tuple(lengths):
                yield a, b, c


def _is_even(length: int, side: int) -> bool:
    """Whether some part is as long as the side: a shorter one makes no more parts."""
    return -(-length // -(-length // side)) == side


def _compact(sides: Sequence[int], grid: Sequence[int]) -> float:
    """The third power of the geometric over the arithmetic mean of the extents, 1 for a cube. An axis that is not cut
    stretches nothing by being short."""
    extents = [float(side * scale) for side, scale in zip(sides, (FRAME, 1, 1), strict=True)]
    cut = [extent for extent, side, length in zip(extents, sides, grid, strict=True) if side < length]
    if not cut:
        return 1.0
    whole = sum(cut) / len(cut)
    extents = sorted(max(x, whole) if side == n else x for x, side, n in zip(extents, sides, grid, strict=True))
    total = extents[0] + extents[1] + extents[2]
    return 27.0 * extents[0] * extents[1] * extents[2] / (total * total * total)


def _cells(parts: Axes, cell: int) -> Axes:
    """The fewest cells of at most so many tokens within these cubes, for their shape."""
    longest = tuple(map(_longest, parts))
    counts = [
        [sum(-(-(b - a) // side) for a, b in itertools.pairwise(starts)) for side in range(1, min(cell, most) + 1)]
        for starts, most in zip(parts, longest, strict=True)
    ]
    choices = []
    for sides in itertools.product(*(range(1, len(of_axis) + 1) for of_axis in counts)):
        if math.prod(sides) <= cell:
            number = math.prod(of_axis[side - 1] for of_axis, side in zip(counts, sides, strict=True))
            choices.append((number * number * number / _compact(sides, longest), max(sides), sides))
    return tuple(map(_within, parts, min(choices)[2]))


def _places(cubes: int, tokens: int, tile: int) -> int:
    return cubes * -(-tokens // tile) * tile


def _longest(starts: Starts) -> int:
    return max(b - a for a, b in itertools.pairwise(starts))


@functools.lru_cache(maxsize=4096)
def _even(length: int, count: int) -> Starts:
    return tuple(length * part // count for part in range(count + 1))


@functools.lru_cache(maxsize=4096)
def _longest_run(length: int, parts: int, runs: int) -> int:
    return _longest(_runs(_even(length, parts), runs))


def _runs(starts: Starts, count: int) -> Starts:
    """The parts joined to so many runs of about as many."""
    return tuple(starts[place] for place in _even(len(starts) - 1, count))


def _within(starts: Starts, side: int) -> Starts:
    """Every part cut into as few as have the side at most."""
    return (0, *(stop for a, b in itertools.pairwise(starts) for _, stop in cut(a, b, side)))
