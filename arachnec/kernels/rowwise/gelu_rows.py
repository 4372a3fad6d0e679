# mypy: ignore-errors
# (Triton's decorators have no types, and its language neither unpacks tuples nor joins conditions of two times.)
"""gelu(x + bias), exact or by tanh, and its backward with the bias's column sums: the Triton kernels.

Nothing is reduced along a row, so a program takes a tile of columns through a run of rows, ROWS at a step.
"""

import triton
import triton.language as tl

# -2 sqrt(2 / pi) log2(e), and 0.044715 times that
_LINEAR: tl.constexpr = tl.constexpr(-2.302208198144325)
_CUBIC: tl.constexpr = tl.constexpr(-0.1029432395800235)


@triton.jit
def _weight(u, square):
    """0.5 * (1 + tanh(v)) = 1 / (1 + exp(-2 v)), by the device's own 2^x and 1 / sqrt(x): a divide takes longer."""
    root = tl.rsqrt(1.0 + tl.exp2(u * (_LINEAR + _CUBIC * square)))
    return root * root


@triton.jit
def _gelu(u, TANH: tl.constexpr):
    if TANH:
        return u * _weight(u, u * u)
    return 0.5 * u * (1.0 + tl.erf(u * 0.7071067811865476))


@triton.jit
def _slope(u, TANH: tl.constexpr):
    if TANH:
        square = u * u
        part = _weight(u, square)
        return part + u * (part - part * part) * (1.5957691216057308 + 0.21406444881780076 * square)
    density = 0.3989422804014327 * tl.exp2(-0.7213475204444817 * u * u)
    return 0.5 * (1.0 + tl.erf(u * 0.7071067811865476)) + u * density


@triton.jit(do_not_specialize=["rows", "run"])
def gelu_forward(
    x, bias, y, x_stride, rows, run,
    F: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TANH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < F
    offset = tl.zeros([TILE], tl.float32)
    if bias is not None:
        offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * run
    end = tl.minimum(first + run, rows)
    for block in tl.range(first, end, ROWS, num_stages=STAGES):
        row = block + tl.arange(0, ROWS)
        there = (row < end)[:, None] & inside[None, :]
        u = tl.load(x + row[:, None].to(tl.int64) * x_stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
        result = _gelu(u + offset[None, :], TANH)
        tl.store(y + row[:, None].to(tl.int64) * F + columns[None, :], result.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "run"])
def gelu_backward(
    dy, x, bias, dx, partials, dy_stride, x_stride, rows, run,
    F: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, TANH: tl.constexpr, STAGES: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """dx, and partials [runs, 1, F] of its column sums."""
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < F
    offset = tl.zeros([TILE], tl.float32)
    if bias is not None:
        offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, TILE], tl.float32)
    first = tl.program_id(0) * run
    end = tl.minimum(first + run, rows)
    for block in tl.range(first, end, ROWS, num_stages=STAGES):
        row = block + tl.arange(0, ROWS)
        there = (row < end)[:, None] & inside[None, :]
        u = tl.load(x + row[:, None].to(tl.int64) * x_stride + columns[None, :], mask=there, other=0.0).to(tl.float32)
        outer = tl.load(dy + row[:, None].to(tl.int64) * dy_stride + columns[None, :], mask=there, other=0.0).to(
            tl.float32
        )
        inner = outer * _slope(u + offset[None, :], TANH)
        tl.store(dx + row[:, None].to(tl.int64) * F + columns[None, :], inner.to(dx.dtype.element_ty), mask=there)
        total += inner
    if SUM:
        tl.store(partials + tl.program_id(0).to(tl.int64) * F + columns, tl.sum(total, 0), mask=inside)
