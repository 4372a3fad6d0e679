# mypy: ignore-errors
# (Triton's decorators have no types.)
"""Attention over lists of key blocks: the Triton kernels, forward and backward.

A program takes a tile of one group's queries, or one key block, and goes over its list in order, so nothing is summed
in an order that depends on others. Groups and blocks are runs of an order of the tokens; rows are read where they are.
The online softmax is that of FlashAttention 2 (arXiv 2307.08691), in powers of 2.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(x, order, place, inside, columns, stride, D: tl.constexpr):
    token = tl.load(order + place, mask=inside, other=0)
    at = x + token[:, None] * stride + columns[None, :]
    return tl.load(at, mask=inside[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _bias(mask, order, row, row_inside, column, column_inside, row_stride, ADDED: tl.constexpr):
    """Of a mask's head: what is added to scores in powers of 2."""
    row_token = tl.load(order + row, mask=row_inside, other=0)
    column_token = tl.load(order + column, mask=column_inside, other=0)
    at = mask + row_token[:, None] * row_stride + column_token[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if ADDED:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    return tl.where(tl.load(at, mask=inside, other=1) != 0, 0.0, float("-inf"))


@triton.jit
def _products(
    x, x_at, x_place, x_inside, y, y_at, y_place, y_inside, order,
    D: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of all rows ``x`` with all rows ``y``. All warps have the rows of such a product whole: where these are too many
    numbers for their registers, CHUNK columns at a time are read again."""
    if CHUNK >= WIDE:
        return tl.dot(x, tl.trans(y), input_precision="tf32x3")
    sums = tl.zeros([x.shape[0], y.shape[0]], tl.float32)
    for first in range(0, WIDE, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        part_x = _rows(x_at, order, x_place, x_inside, columns, D, D)
        part_y = _rows(y_at, order, y_place, y_inside, columns, D, D)
        sums += tl.dot(part_x, tl.trans(part_y), input_precision="tf32x3")
    return sums


@triton.jit(do_not_specialize=["tokens", "group_count", "heads", "mask_clip", "mask_head", "mask_row"])
def attention_forward(
    query, key, value, mask, out, lse, order, tiles, tile_groups, groups, blocks, indices, starts,
    tokens, group_count, heads, mask_clip, mask_head, mask_row, scale,
    D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (tile, clip x head): QUERIES queries of a group. Heads are [B, H, S, D], contiguous."""
    head = tl.program_id(1).to(tl.int64)
    group = tl.load(tile_groups + tl.program_id(0))
    row = tl.load(tiles + tl.program_id(0)) + tl.arange(0, QUERIES)
    row_inside = row < tl.load(groups + group + 1)
    columns = tl.arange(0, WIDE)
    shift = head * tokens * D
    q = _rows(query + shift, order, row, row_inside, columns, D, D)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    result = tl.zeros([QUERIES, WIDE], tl.float32)
    first = tl.load(starts + head * group_count + group)
    last = tl.load(starts + head * group_count + group + 1)
    mask_at = mask + (head // heads) * mask_clip + (head % heads) * mask_head
    for entry in range(first, last):
        block = tl.load(indices + entry)
        begin, end = tl.load(blocks + block), tl.load(blocks + block + 1)
        for split in range(SPLITS):
            column = begin + split * KEYS + tl.arange(0, KEYS)
            column_inside = column < end
            k = _rows(key + shift, order, column, column_inside, columns, D, D)
            scores = _products(
                q, query + shift, row, row_inside, k, key + shift, column, column_inside, order, D, WIDE, CHUNK
            )
            scores *= scale * LOG2E
            if MASKED:
                scores += _bias(mask_at, order, row, row_inside, column, column_inside, mask_row, ADDED)
            scores = tl.where(column_inside[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores - safe[:, None])
            decay = tl.exp2(top - safe)
            v = _rows(value + shift, order, column, column_inside, columns, D, D)
            total = total * decay + tl.sum(weights, 1)
            result = result * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
            top = new_top
    sees = total > 0.0
    result = result / tl.where(sees, total, 1.0)[:, None]
    token = tl.load(order + row, mask=row_inside, other=0)
    at = out + shift + token[:, None] * D + columns[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=row_inside[:, None] & (columns < D)[None, :])
    natural = (top + tl.log2(tl.where(sees, total, 1.0))) / LOG2E
    tl.store(lse + head * tokens + token, tl.where(sees, natural, float("-inf")), mask=row_inside)


@triton.jit
def _slopes(scores, inner, row_lse, row_delta, bias, column_inside, scale, MASKED: tl.constexpr):
    """Weights, and gradients of the scaled scores, from products of queries with keys and of gradients with values."""
    scores *= scale * LOG2E
    if MASKED:
        scores += bias
    weights = tl.exp2(scores - row_lse[:, None] * LOG2E)
    weights = tl.where(column_inside[None, :], weights, 0.0)
    return weights, weights * (inner - row_delta[:, None]) * scale


@triton.jit(do_not_specialize=["tokens", "group_count", "heads", "mask_clip", "mask_head", "mask_row"])
def query_gradients(
    grad, query, key, value, mask, lse, delta, of_query, order, tiles, tile_groups, groups, blocks, indices, starts,
    tokens, group_count, heads, mask_clip, mask_head, mask_row, scale,
    D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (tile, clip x head), over the tile's list; ``lse`` is +inf where a query sees nothing."""
    head = tl.program_id(1).to(tl.int64)
    group = tl.load(tile_groups + tl.program_id(0))
    row = tl.load(tiles + tl.program_id(0)) + tl.arange(0, QUERIES)
    row_inside = row < tl.load(groups + group + 1)
    columns = tl.arange(0, WIDE)
    shift = head * tokens * D
    q = _rows(query + shift, order, row, row_inside, columns, D, D)
    g = _rows(grad + shift, order, row, row_inside, columns, D, D)
    token = tl.load(order + row, mask=row_inside, other=0)
    row_lse = tl.load(lse + head * tokens + token, mask=row_inside, other=float("inf"))
    row_delta = tl.load(delta + head * tokens + token, mask=row_inside, other=0.0)
    result = tl.zeros([QUERIES, WIDE], tl.float32)
    first = tl.load(starts + head * group_count + group)
    last = tl.load(starts + head * group_count + group + 1)
    mask_at = mask + (head // heads) * mask_clip + (head % heads) * mask_head
    for entry in range(first, last):
        block = tl.load(indices + entry)
        begin, end = tl.load(blocks + block), tl.load(blocks + block + 1)
        for split in range(SPLITS):
            column = begin + split * KEYS + tl.arange(0, KEYS)
            column_inside = column < end
            k = _rows(key + shift, order, column, column_inside, columns, D, D)
            v = _rows(value + shift, order, column, column_inside, columns, D, D)
            bias = 0.0
            if MASKED:
                bias = _bias(mask_at, order, row, row_inside, column, column_inside, mask_row, ADDED)
            scores = _products(
                q, query + shift, row, row_inside, k, key + shift, column, column_inside, order, D, WIDE, CHUNK
            )
            inner = _products(
                g, grad + shift, row, row_inside, v, value + shift, column, column_inside, order, D, WIDE, CHUNK
            )
            _, slopes = _slopes(scores, inner, row_lse, row_delta, bias, column_inside, scale, MASKED)
            result += tl.dot(slopes.to(k.dtype), k, input_precision="tf32x3")
    at = of_query + shift + token[:, None] * D + columns[None, :]
    tl.store(at, result.to(of_query.dtype.element_ty), mask=row_inside[:, None] & (columns < D)[None, :])


@triton.jit(do_not_specialize=["tokens", "block_count", "heads", "mask_clip", "mask_head", "mask_row"])
def key_gradients(
    grad, query, key, value, mask, lse, delta, of_key, of_value, order, groups, blocks, readers, starts,
    tokens, block_count, heads, mask_clip, mask_head, mask_row, scale,
    D: tl.constexpr, WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, MASKED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Program (block, clip x head, split of the block), over the groups that read it, in ascending order."""
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    column = tl.load(blocks + block) + tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    column_inside = column < tl.load(blocks + block + 1)
    columns = tl.arange(0, WIDE)
    shift = head * tokens * D
    k = _rows(key + shift, order, column, column_inside, columns, D, D)
    v = _rows(value + shift, order, column, column_inside, columns, D, D)
    dk = tl.zeros([KEYS, WIDE], tl.float32)
    dv = tl.zeros([KEYS, WIDE], tl.float32)
    first = tl.load(starts + head * block_count + block)
    last = tl.load(starts + head * block_count + block + 1)
    mask_at = mask + (head // heads) * mask_clip + (head % heads) * mask_head
    for entry in range(first, last):
        group = tl.load(readers + entry)
        begin, end = tl.load(groups + group), tl.load(groups + group + 1)
        for split in range(SPLITS):
            row = begin + split * QUERIES + tl.arange(0, QUERIES)
            row_inside = row < end
            q = _rows(query + shift, order, row, row_inside, columns, D, D)
            g = _rows(grad + shift, order, row, row_inside, columns, D, D)
            token = tl.load(order + row, mask=row_inside, other=0)
            row_lse = tl.load(lse + head * tokens + token, mask=row_inside, other=float("inf"))
            row_delta = tl.load(delta + head * tokens + token, mask=row_inside, other=0.0)
            bias = 0.0
            if MASKED:
                bias = _bias(mask_at, order, row, row_inside, column, column_inside, mask_row, ADDED)
            scores = _products(
                q, query + shift, row, row_inside, k, key + shift, column, column_inside, order, D, WIDE, CHUNK
            )
            inner = _products(
                g, grad + shift, row, row_inside, v, value + shift, column, column_inside, order, D, WIDE, CHUNK
            )
            weights, slopes = _slopes(scores, inner, row_lse, row_delta, bias, column_inside, scale, MASKED)
            dv += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision="tf32x3")
            dk += tl.dot(tl.trans(slopes.to(q.dtype)), q, input_precision="tf32x3")
    token = tl.load(order + column, mask=column_inside, other=0)
    inside = column_inside[:, None] & (columns < D)[None, :]
    at = shift + token[:, None] * D + columns[None, :]
    tl.store(of_key + at, dk.to(of_key.dtype.element_ty), mask=inside)
    tl.store(of_value + at, dv.to(of_value.dtype.element_ty), mask=inside)
