"""The sides of cubes: held against all others on small grids, and never less filled than powers of two."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.kernels.sparse.cube_sides import (
    CELL,
    FRAME,
    Axes,
    Grid,
    Starts,
    cubes_in,
    cut_grid,
    doubled_cut,
    group_count,
    places_in,
)

GRIDS = st.tuples(st.integers(1, 7), st.integers(1, 9), st.integers(1, 9))
SIZES = st.sampled_from([(16, 8), (24, 8), (8, 8), (8, 24), (12, 4), (30, 10)])  # queries and keys
VIDEO = tuple((frames, *picture) for picture in ((30, 52), (45, 80), (30, 45)) for frames in (5, 9, 13, 17, 21, 25, 33))


def sides_of(axes: Axes) -> tuple[int, ...]:
    return tuple(max(b - a for a, b in itertools.pairwise(starts)) for starts in axes)


def evenly(length: int, count: int) -> Starts:
    return tuple(length * part // count for part in range(count + 1))


def fewest(length: int) -> list[int]:
    """The numbers of parts of an axis of which no smaller one has as short a longest part."""
    return sorted({-(-length // side) for side in range(1, length + 1)})


def every_cut(grid: Grid, large: int, small: int) -> Iterator[tuple[Axes, Axes]]:
    """All that have groups of whole blocks, or blocks of whole groups, on each axis as few as their side lets."""
    for counts in itertools.product(*map(fewest, grid)):
        inner = tuple(map(evenly, grid, counts))
        tokens = math.prod(sides_of(inner))
        if tokens > small or not (2 * tokens > small or counts == (1, 1, 1)):
            continue
        for runs in itertools.product(*map(fewest, counts)):
            places = [evenly(count, run) for count, run in zip(counts, runs, strict=True)]
            outer = tuple(tuple(row[n] for n in place) for row, place in zip(inner, places, strict=True))
            of_run = math.prod(max(b - a for a, b in itertools.pairwise(place)) for place in places) * tokens
            if of_run <= large and (2 * of_run > large or runs == (1, 1, 1)):
                yield outer, inner


def worth(axes: Axes, grid: Grid, tile: int) -> float:
    """The share of filled places, times how much of a cube the sides are."""
    extents = [side * scale for side, scale in zip(sides_of(axes), (FRAME, 1, 1), strict=True)]
    free = [x for x, side, length in zip(extents, sides_of(axes), grid, strict=True) if side < length]
    if not free:
        return math.prod(grid) / places_in(axes, tile)
    rows = zip(extents, sides_of(axes), grid, strict=True)
    extents = [max(x, statistics.fmean(free)) if side == length else x for x, side, length in rows]
    return math.prod(grid) / places_in(axes, tile) * statistics.geometric_mean(extents) / statistics.fmean(extents)


@settings(max_examples=60, deadline=None)
@given(grid=GRIDS, sizes=SIZES)
def test_no_other_cut_fills_more_for_its_shape(grid: Grid, sizes: tuple[int, int]) -> None:
    large, small = max(sizes), min(sizes)
    cell = min(CELL, small)
    chosen, doubled = cut_grid(grid, *sizes, cell), doubled_cut(grid, *sizes, cell)
    if chosen == doubled:
        return
    best = worth(chosen.large, grid, small) * worth(chosen.small, grid, small)
    for outer, inner in every_cut(grid, large, small):
        fills = (places_in(outer, small), places_in(inner, small))
        if fills[0] > places_in(doubled.large, small) or fills[1] > places_in(doubled.small, small):
            continue
        if worth(outer, grid, small) * worth(inner, grid, small) > best * (1 + 1e-9):
            cells = fewest_cells(inner, cell)
            assert cells > cubes_in(doubled.cells), (outer, inner)


def fewest_cells(axes: Axes, cell: int) -> int:
    """Of the shape that is taken: the fewest for it."""
    cut = []
    for sides in itertools.product(*(range(1, side + 1) for side in sides_of(axes))):
        if math.prod(sides) > cell:
            continue
        rows = zip(axes, sides, strict=True)
        number = math.prod(sum(-(-(b - a) // side) for a, b in itertools.pairwise(row)) for row, side in rows)
        extents = [side * scale for side, scale in zip(sides, (FRAME, 1, 1), strict=True)]
        free = [x for x, side, most in zip(extents, sides, sides_of(axes), strict=True) if side < most]
        if free:
            middle = statistics.fmean(free)
            rows_of = zip(extents, sides, sides_of(axes), strict=True)
            extents = [max(x, middle) if side == most else x for x, side, most in rows_of]
        shape = statistics.fmean(extents) / statistics.geometric_mean(extents) if free else 1.0
        cut.append((round(number * shape, 9), number))
    return min(cut)[1]


@settings(max_examples=200, deadline=None)
@given(
    grid=st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 90)),
    queries=st.integers(1, 300),
    keys=st.integers(1, 130),
    data=st.data(),
)
def test_cubes_nest_hold_no_more_than_is_asked_for_and_are_no_less_filled_than_powers_of_two(
    grid: Grid, queries: int, keys: int, data: st.DataObject
) -> None:
    large, small = max(queries, keys), min(queries, keys)
    cell = data.draw(st.integers(1, small))
    chosen, doubled = (cut(grid, queries, keys, cell) for cut in (cut_grid, doubled_cut))
    for outer, inner, cells, length in zip(chosen.large, chosen.small, chosen.cells, grid, strict=True):
        assert set(outer) <= set(inner) <= set(cells) <= set(range(length + 1))
        for starts in (outer, inner, cells):
            assert starts[0] == 0 and starts[-1] == length and list(starts) == sorted(set(starts))
    for axes, most in ((chosen.large, large), (chosen.small, small), (chosen.cells, cell)):
        assert math.prod(sides_of(axes)) <= most
    assert places_in(chosen.large, small) <= places_in(doubled.large, small)
    assert places_in(chosen.small, small) <= places_in(doubled.small, small)
    usual = [cut(grid, queries, keys, min(CELL, small)) for cut in (cut_grid, doubled_cut)]
    assert cubes_in(usual[0].cells) <= cubes_in(usual[1].cells)
    assert (usual[0].large, usual[0].small) == (chosen.large, chosen.small), "whatever the cells are"
    assert group_count(grid, queries, keys) == cubes_in(chosen.large if queries >= keys else chosen.small)


@pytest.mark.parametrize("grid", VIDEO)
def test_blocks_of_usual_videos_are_nearly_full(grid: Grid) -> None:
    tokens, alone = math.prod(grid), cut_grid(grid, 64, 64, 8)
    assert tokens / places_in(alone.small, 64) > (0.83 if grid[0] > 5 else 0.77)
    both = cut_grid(grid, 256, 64, 8)
    assert tokens / places_in(both.small, 64) > 0.83 and tokens / places_in(both.large, 64) > 0.72


def test_grids_of_powers_of_two_are_cut_as_they_were() -> None:
    for grid in ((2, 8, 16), (4, 16, 16), (8, 32, 32), (16, 32, 32)):
        assert cut_grid(grid, 256, 64, 8) == doubled_cut(grid, 256, 64, 8)
