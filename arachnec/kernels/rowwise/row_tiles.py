# mypy: ignore-errors
# ruff: noqa: E501, RUF005, SIM102
# (Triton's decorators have no types, and its language neither unpacks tuples nor joins conditions of two times.)
"""Rows as tuples of tiles, and which run of rows a program takes: what every kernel here is made of.

A row of H values lies in ceil(H / TILE) tiles of TILE lanes, 5120 = 5 x 1024, so that no lane is spent on the next power
of two. A tile never leaves the registers between its uses. All arithmetic is fp32; values are rounded where they are stored.
"""

import triton
import triton.language as tl


@triton.jit
def run_of_rows(program, lengths, groups, group_rows, run, SEGMENTS: tl.constexpr):
    """First row, end row and group of a program that takes at most ``run`` rows, all of one group.

    ``lengths``: cumulative lengths [groups + 1] of a packed sequence, or None where every group has ``group_rows`` rows.
    SEGMENTS: a power of two of at least ``groups``. Programs past the last run get no rows. Rows are counted in 32 bits,
    which costs half the registers; what a row starts at takes 64.
    """
    if lengths is not None:
        at = tl.arange(0, SEGMENTS)
        start = tl.load(lengths + at, mask=at < groups, other=0).to(tl.int32)
        stop = tl.load(lengths + at + 1, mask=at < groups, other=0).to(tl.int32)
        runs = (stop - start + run - 1) // run
        ends = tl.cumsum(runs, 0)
        group = tl.sum((ends <= program).to(tl.int32), 0)
        here = at == group
        first = tl.sum(tl.where(here, start + (program - ends + runs) * run, 0), 0)
        end = tl.minimum(first + run, tl.sum(tl.where(here, stop, 0), 0))
        group = tl.minimum(group, groups - 1)
    else:
        runs_each = (group_rows + run - 1) // run
        group = program // runs_each
        first = group * group_rows + (program - group * runs_each) * run
        end = tl.minimum(first + run, (group + 1) * group_rows)
    return first, end, group


@triton.jit
def runs_of_group(group, lengths, groups, group_rows, run, SEGMENTS: tl.constexpr):
    """The programs, first and end, whose rows are those of a group: the inverse of ``run_of_rows``."""
    if lengths is not None:
        at = tl.arange(0, SEGMENTS)
        start = tl.load(lengths + at, mask=at < groups, other=0).to(tl.int32)
        stop = tl.load(lengths + at + 1, mask=at < groups, other=0).to(tl.int32)
        runs = (stop - start + run - 1) // run
        ends = tl.cumsum(runs, 0)
        end = tl.sum(tl.where(at == group, ends, 0), 0)
        first = tl.sum(tl.where(at == group, ends - runs, 0), 0)
    else:
        runs_each = (group_rows + run - 1) // run
        first = group * runs_each
        end = first + runs_each
    return first, end


@triton.jit
def load_tiles(base, H: tl.constexpr, TILE: tl.constexpr):
    """A row as a tuple of fp32 tiles; lanes past H are 0."""
    tiles = ()
    for t in tl.static_range((H + TILE - 1) // TILE):
        at = t * TILE + tl.arange(0, TILE)
        if H % TILE == 0:
            tiles = tiles + (tl.load(base + at).to(tl.float32),)
        else:
            tiles = tiles + (tl.load(base + at, mask=at < H, other=0.0).to(tl.float32),)
    return tiles


@triton.jit
def store_tiles(base, tiles, H: tl.constexpr, TILE: tl.constexpr):
    for t in tl.static_range((H + TILE - 1) // TILE):
        at = t * TILE + tl.arange(0, TILE)
        if H % TILE == 0:
            tl.store(base + at, tiles[t].to(base.dtype.element_ty))
        else:
            tl.store(base + at, tiles[t].to(base.dtype.element_ty), mask=at < H)


@triton.jit
def zero_tiles(H: tl.constexpr, TILE: tl.constexpr):
    tiles = ()
    for _ in tl.static_range((H + TILE - 1) // TILE):
        tiles = tiles + (tl.zeros([TILE], tl.float32),)
    return tiles


@triton.jit
def add_products(sums, a, b, TILES: tl.constexpr):
    """sums + a * b, tile by tile."""
    added = ()
    for t in tl.static_range(TILES):
        added = added + (sums[t] + a[t] * b[t],)
    return added


@triton.jit
def add_tiles(sums, a, TILES: tl.constexpr):
    added = ()
    for t in tl.static_range(TILES):
        added = added + (sums[t] + a[t],)
    return added


@triton.jit(do_not_specialize=["groups", "group_rows", "run"])
def column_sums(
    partials, first_sum, second_sum, third_sum, lengths, groups, group_rows, run,
    KINDS: tl.constexpr, H: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Second stage: up to three sums [groups, H] of partials [programs, KINDS, H], each over its group's programs in order."""
    group = tl.program_id(0)
    kind = tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < H
    first, end = runs_of_group(group, lengths, groups, group_rows, run, SEGMENTS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(first, end, ROWS):
        rows = block + tl.arange(0, ROWS)
        read = (rows < end)[:, None] & inside[None, :]
        at = (rows[:, None].to(tl.int64) * KINDS + kind) * H + columns[None, :]
        total += tl.load(partials + at, mask=read, other=0.0)
    result = tl.sum(total, 0)
    target = group.to(tl.int64) * H + columns
    if kind == 0:
        tl.store(first_sum + target, result.to(first_sum.dtype.element_ty), mask=inside)
    if KINDS > 1:
        if kind == 1:
            tl.store(second_sum + target, result.to(second_sum.dtype.element_ty), mask=inside)
    if KINDS > 2:
        if kind == 2:
            tl.store(third_sum + target, result.to(third_sum.dtype.element_ty), mask=inside)
