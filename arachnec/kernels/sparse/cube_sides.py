"""How a clip's grid is cut into cubes, on plain numbers: sides, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Iterator

Grid = tuple[int, int, int]  # frames, height, width, in tokens


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
    sides = [cube_of(size, grid) for size in sorted({queries, keys}, reverse=True) if size >= queries]
    counts = []
    for axis, length in enumerate(grid):
        parts = [(0, length)]
        for side in sides:
            parts = [inner for first, end in parts for inner in cut(first, end, side[axis])]
        counts.append(len(parts))
    return math.prod(counts)


def cut(first: int, end: int, side: int) -> Iterator[tuple[int, int]]:
    """As few parts as hold at most ``side`` places each, and as even as they can be."""
    count = -(-(end - first) // side)
    for part in range(count):
        yield first + (end - first) * part // count, first + (end - first) * (part + 1) // count
