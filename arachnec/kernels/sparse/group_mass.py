# mypy: ignore-errors
# (Triton's decorators have no types.)
"""The attention that query groups give to key blocks, by predicted scores of cells: a Triton kernel.

A program has the cells of some groups as the rows of a tile and goes over all cells of the clip twice: for the
log-sum-exp of every row, and for the sums of weights. So no table of scores exists. Nothing is summed in an order that
depends on other programs.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _features(x, cell, real, columns, R: tl.constexpr):
    return tl.load(x + cell[:, None] * R + columns[None, :], mask=real[:, None] & (columns < R)[None, :], other=0.0)


@triton.jit
def _scores(rows, key, tokens, cell, real, columns, R: tl.constexpr):
    """In powers of 2, the logarithm of the cell's tokens added; -inf where there is no cell."""
    of_cells = _features(key, cell, real, columns, R)
    products = tl.dot(rows, tl.trans(of_cells), input_precision="tf32x3") * LOG2E
    many = tl.load(tokens + cell, mask=real, other=1.0)
    return tl.where(real[None, :], products + tl.log2(many)[None, :], float("-inf"))


@triton.jit(do_not_specialize=["cells", "groups", "blocks"])
def group_mass(
    query, key, mass, group_starts, block_starts, tokens, cells, groups, blocks,
    R: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    BLOCKS: tl.constexpr, SPLITS: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """Program (tile of GROUPS groups, head). A group has at most PARTS times ROWS cells, a block SPLITS times CELLS;
    ``tokens`` are those of each cell, fp32. Features are [heads, C, R], ``mass`` is [heads, G, N], fp32, contiguous."""
    head = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, WIDE)
    query += head * cells * R
    key += head * cells * R
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    first = tl.load(group_starts + group, mask=group < groups, other=0)
    end = tl.load(group_starts + group + 1, mask=group < groups, other=0)
    mass += (head * groups + group[:, None]) * blocks
    for part in range(PARTS):
        place = first[:, None] + part * ROWS + tl.arange(0, ROWS)[None, :]
        row = tl.reshape(place, [GROUPS * ROWS])
        inside = tl.reshape(place < end[:, None], [GROUPS * ROWS])
        q = _features(query, row, inside, columns, R)
        top = tl.full([GROUPS * ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUPS * ROWS], tl.float32)
        for start in range(0, cells, BLOCKS * CELLS):
            cell = start + tl.arange(0, BLOCKS * CELLS)
            scores = _scores(q, key, tokens, cell, cell < cells, columns, R)
            new_top = tl.maximum(top, tl.max(scores, 1))
            total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(scores - new_top[:, None]), 1)
            top = new_top
        lse = top + tl.log2(total)
        share = tl.load(tokens + row, mask=inside, other=0.0)
        for start in range(0, blocks, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            of_block = tl.load(block_starts + block, mask=block < blocks, other=0)
            until = tl.load(block_starts + block + 1, mask=block < blocks, other=0)
            sums = tl.zeros([GROUPS, BLOCKS], tl.float32)
            for split in range(SPLITS):
                at = of_block[:, None] + split * CELLS + tl.arange(0, CELLS)[None, :]
                cell = tl.reshape(at, [BLOCKS * CELLS])
                real = tl.reshape(at < until[:, None], [BLOCKS * CELLS])
                scores = _scores(q, key, tokens, cell, real, columns, R)
                weights = tl.exp2(scores - lse[:, None]) * share[:, None]
                of_rows = tl.sum(tl.reshape(weights, [GROUPS, ROWS, BLOCKS * CELLS]), 1)
                sums += tl.sum(tl.reshape(of_rows, [GROUPS, BLOCKS, CELLS]), 2)
            target = mass + block[None, :]
            known = (group < groups)[:, None] & (block < blocks)[None, :]
            if PARTS > 1:
                sums += tl.load(target, mask=known & (part > 0), other=0.0)
            tl.store(target, sums, mask=known)
