# mypy: ignore-errors
# (Triton's decorators have no types.)
"""Attention over lists of key blocks: the Triton kernels, forward and backward.

A program takes a tile of one group's queries, or a part of one key block, and goes over its list in order, so nothing
is summed in an order that depends on others. ``slots`` say which token stands at each place of a tile, -1 for none:
rows are read where they are. A list and the parts of what it names are one loop, whose reads Triton can begin before
they are needed. The online softmax is that of FlashAttention 2 (arXiv 2307.08691), in powers of 2.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
GENERIC = ["tokens", "listed", "heads", "mask_clip", "mask_head", "mask_row"]  # one kernel for all lengths


@triton.jit
def _rows(x, token, columns, D: tl.constexpr):
    at = x + token[:, None] * D + columns[None, :]
    return tl.load(at, mask=(token >= 0)[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _bias(mask, row, column, row_stride, ADDED: tl.constexpr):
    """Of a mask's head: what is added to scores in powers of 2. One of ``row`` and ``column`` is [n, 1], one [1, n]."""
    at = mask + row.to(tl.int64) * row_stride + column
    inside = (row >= 0) & (column >= 0)
    if ADDED:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return tl.where(tl.load(at, mask=inside, other=1) != 0, 0.0, float("-inf"))


@triton.jit
def _products(x, x_at, x_token, y, y_at, y_token, D: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr):
    """Of all rows ``x`` with all rows ``y``. All warps have the rows of such a product whole: where these are too many
    numbers for their registers, CHUNK columns at a time are read again."""
    if CHUNK >= WIDE:
        return tl.dot(x, tl.trans(y), input_precision="tf32x3")
    sums = tl.zeros([x.shape[0], y.shape[0]], tl.float32)
    for first in range(0, WIDE, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        part_x, part_y = _rows(x_at, x_token, columns, D), _rows(y_at, y_token, columns, D)
        sums += tl.dot(part_x, tl.trans(part_y), input_precision="tf32x3")
    return sums


@triton.jit(do_not_specialize=GENERIC)
def attention_forward(
    query, key, value, mask, out, lse, query_slots, key_slots, indices, starts,
    tokens, listed, heads, mask_clip, mask_head, mask_row, scale,
    D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (tile, clip x head), the last tile first: captions' are the longest. ``listed`` groups have PARTS tiles
    of queries each, of which some may be empty, and blocks SPLITS of keys. Heads are [B, H, S, D], contiguous."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.load(query_slots + tile * QUERIES + tl.arange(0, QUERIES))
    columns = tl.arange(0, WIDE)
    shift = head * tokens * D
    q = _rows(query + shift, row, columns, D)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, WIDE], tl.float32)
    first = tl.load(starts + head * listed + tile // PARTS) * SPLITS
    last = tl.load(starts + head * listed + tile // PARTS + 1) * SPLITS
    last = tl.where(tl.load(query_slots + tile * QUERIES) >= 0, last, first)
    mask_at = mask + (head // heads) * mask_clip + (head % heads) * mask_head
    for entry in range(first, last):
        place = tl.load(indices + entry // SPLITS) * SPLITS + entry % SPLITS
        column = tl.load(key_slots + place * KEYS + tl.arange(0, KEYS))
        k = _rows(key + shift, column, columns, D)
        scores = _products(q, query + shift, row, k, key + shift, column, D, WIDE, CHUNK)
        scores *= scale * LOG2E
        if MASKED:
            scores += _bias(mask_at, row[:, None], column[None, :], mask_row, ADDED)
        scores = tl.where((column >= 0)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        decay = tl.exp2(top - safe)
        v = _rows(value + shift, column, columns, D)
        total = total * decay + tl.sum(weights, 1)
        result = result * decay[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        top = new_top
    sees = total > 0.0
    result = result / tl.where(sees, total, 1.0)[:, None]
    _store(out + shift, result, row, columns, D)
    natural = (top + tl.log2(tl.where(sees, total, 1.0))) / LOG2E
    tl.store(lse + head * tokens + row, tl.where(sees, natural, float("-inf")), mask=row >= 0)


@triton.jit
def _store(x, values, token, columns, D: tl.constexpr):
    at = x + token[:, None] * D + columns[None, :]
    tl.store(at, values.to(x.dtype.element_ty), mask=(token >= 0)[:, None] & (columns < D)[None, :])


@triton.jit
def _logsumexp(lse, token):
    """In powers of 2; +inf where there is no query, or one that sees nothing: all its weights are 0."""
    given = tl.load(lse + token, mask=token >= 0, other=float("inf"))
    return tl.where(given == float("-inf"), float("inf"), given * LOG2E)


@triton.jit(do_not_specialize=GENERIC)
def query_gradients(
    grad, query, key, value, mask, out, lse, delta, of_query, query_slots, key_slots, indices, starts,
    tokens, listed, heads, mask_clip, mask_head, mask_row, scale,
    D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (tile, clip x head) as in the forward. Also writes ``delta``, the products of outputs and their
    gradients, for ``key_gradients``."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.load(query_slots + tile * QUERIES + tl.arange(0, QUERIES))
    columns = tl.arange(0, WIDE)
    shift = head * tokens * D
    g = _rows(grad + shift, row, columns, D)
    o = _rows(out + shift, row, columns, D)
    row_delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + head * tokens + row, row_delta, mask=row >= 0)
    row_lse = _logsumexp(lse + head * tokens, row)
    q = _rows(query + shift, row, columns, D)
    result = tl.zeros([QUERIES, WIDE], tl.float32)
    first = tl.load(starts + head * listed + tile // PARTS) * SPLITS
    last = tl.load(starts + head * listed + tile // PARTS + 1) * SPLITS
    last = tl.where(tl.load(query_slots + tile * QUERIES) >= 0, last, first)
    mask_at = mask + (head // heads) * mask_clip + (head % heads) * mask_head
    for entry in range(first, last):
        place = tl.load(indices + entry // SPLITS) * SPLITS + entry % SPLITS
        column = tl.load(key_slots + place * KEYS + tl.arange(0, KEYS))
        k = _rows(key + shift, column, columns, D)
        v = _rows(value + shift, column, columns, D)
        scores = _products(q, query + shift, row, k, key + shift, column, D, WIDE, CHUNK)
        inner = _products(g, grad + shift, row, v, value + shift, column, D, WIDE, CHUNK)
        scores *= scale * LOG2E
        if MASKED:
            scores += _bias(mask_at, row[:, None], column[None, :], mask_row, ADDED)
        weights = tl.exp2(scores - row_lse[:, None])
        weights = tl.where((column >= 0)[None, :], weights, 0.0)
        slopes = weights * (inner - row_delta[:, None])
        result += tl.dot(slopes.to(k.dtype), k, input_precision="tf32x3")
    _store(of_query + shift, result * scale, row, columns, D)


@triton.jit(do_not_specialize=GENERIC)
def key_gradients(
    grad, query, key, value, mask, lse, delta, of_key, of_value, query_slots, key_slots, readers, starts,
    tokens, listed, heads, mask_clip, mask_head, mask_row, scale,
    D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (part of a block, clip x head), the last first, over the groups that read it, in ascending order; of the
    ``listed`` blocks. Tables of weights have keys as rows, as the gradients have that they are multiplied into."""
    head = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    column = tl.load(key_slots + tile * KEYS + tl.arange(0, KEYS))
    columns = tl.arange(0, WIDE)
    shift = head * tokens * D
    k = _rows(key + shift, column, columns, D)
    v = _rows(value + shift, column, columns, D)
    dk = tl.zeros([KEYS, WIDE], tl.float32)
    dv = tl.zeros([KEYS, WIDE], tl.float32)
    first = tl.load(starts + head * listed + tile // SPLITS) * PARTS
    last = tl.load(starts + head * listed + tile // SPLITS + 1) * PARTS
    last = tl.where(tl.load(key_slots + tile * KEYS) >= 0, last, first)
    mask_at = mask + (head // heads) * mask_clip + (head % heads) * mask_head
    for entry in range(first, last):
        place = tl.load(readers + entry // PARTS) * PARTS + entry % PARTS
        row = tl.load(query_slots + place * QUERIES + tl.arange(0, QUERIES))
        q = _rows(query + shift, row, columns, D)
        g = _rows(grad + shift, row, columns, D)
        row_lse = _logsumexp(lse + head * tokens, row)
        row_delta = tl.load(delta + head * tokens + row, mask=row >= 0, other=0.0)
        scores = _products(k, key + shift, column, q, query + shift, row, D, WIDE, CHUNK)
        inner = _products(v, value + shift, column, g, grad + shift, row, D, WIDE, CHUNK)
        scores *= scale * LOG2E
        if MASKED:
            scores += _bias(mask_at, row[None, :], column[:, None], mask_row, ADDED)
        weights = tl.exp2(scores - row_lse[None, :])
        slopes = weights * (inner - row_delta[None, :])
        dv += tl.dot(weights.to(g.dtype), g, input_precision="tf32x3")
        dk += tl.dot(slopes.to(q.dtype), q, input_precision="tf32x3")
    _store(of_key + shift, dk * scale, column, columns, D)
    _store(of_value + shift, dv, column, columns, D)
