# mypy: ignore-errors
# (Triton's decorators have no types, and its language neither unpacks tuples nor joins conditions of two times.)
"""residual + gate * branch, and its backward with the gate's column sums: the Triton kernels.

Nothing is reduced along a row, so a program takes a tile of columns through a run of rows of one group, ROWS at a step;
the group's gate is read once. In ``PER_ROW`` it is read with each row.
"""

import triton
import triton.language as tl

from arachnec.kernels.rowwise.row_tiles import run_of_rows


@triton.jit(do_not_specialize=["groups", "group_rows", "run"])
def gate_forward(
    branch, residual, gate, lengths, h, branch_stride, residual_stride, gate_stride, groups, group_rows, run,
    F: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PER_ROW: tl.constexpr, SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < F
    first, end, group = run_of_rows(tl.program_id(0), lengths, groups, group_rows, run, SEGMENTS)
    if not PER_ROW:
        factor = tl.load(gate + group.to(tl.int64) * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)[
            None, :
        ]
    for block in tl.range(first, end, ROWS, num_stages=STAGES):
        row = block + tl.arange(0, ROWS)
        there = (row < end)[:, None] & inside[None, :]
        added = tl.load(
            branch + row[:, None].to(tl.int64) * branch_stride + columns[None, :], mask=there, other=0.0
        ).to(tl.float32)
        stream = tl.load(
            residual + row[:, None].to(tl.int64) * residual_stride + columns[None, :], mask=there, other=0.0
        ).to(tl.float32)
        if PER_ROW:
            factor = tl.load(
                gate + row[:, None].to(tl.int64) * gate_stride + columns[None, :], mask=there, other=0.0
            ).to(tl.float32)
        total = stream + factor * added
        tl.store(h + row[:, None].to(tl.int64) * F + columns[None, :], total.to(h.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["groups", "group_rows", "run"])
def gate_backward(
    dh, branch, gate, lengths, dbranch, dgate, partials, dh_stride, branch_stride, gate_stride, groups, group_rows, run,
    F: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PER_ROW: tl.constexpr, SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """dbranch = gate * dh, and partials [runs, 1, F] of the column sums of dh * branch; in PER_ROW those are dgate."""
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < F
    first, end, group = run_of_rows(tl.program_id(0), lengths, groups, group_rows, run, SEGMENTS)
    if not PER_ROW:
        factor = tl.load(gate + group.to(tl.int64) * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)[
            None, :
        ]
    total = tl.zeros([ROWS, TILE], tl.float32)
    for block in tl.range(first, end, ROWS, num_stages=STAGES):
        row = block + tl.arange(0, ROWS)
        there = (row < end)[:, None] & inside[None, :]
        outer = tl.load(dh + row[:, None].to(tl.int64) * dh_stride + columns[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        if PER_ROW:
            factor = tl.load(
                gate + row[:, None].to(tl.int64) * gate_stride + columns[None, :], mask=there, other=0.0
            ).to(tl.float32)
        tl.store(
            dbranch + row[:, None].to(tl.int64) * F + columns[None, :],
            (factor * outer).to(dbranch.dtype.element_ty),
            mask=there,
        )
        if SUM or dgate is not None:
            added = tl.load(
                branch + row[:, None].to(tl.int64) * branch_stride + columns[None, :], mask=there, other=0.0
            ).to(tl.float32)
            if SUM:
                total += outer * added
            if dgate is not None:
                tl.store(
                    dgate + row[:, None].to(tl.int64) * F + columns[None, :],
                    (outer * added).to(dgate.dtype.element_ty),
                    mask=there,
                )
    if SUM:
        tl.store(partials + tl.program_id(0).to(tl.int64) * F + columns, tl.sum(total, 0), mask=inside)
