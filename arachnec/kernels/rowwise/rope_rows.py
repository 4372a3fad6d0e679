# mypy: ignore-errors
# ruff: noqa: E501, RUF005
# (Triton's decorators have no types, and its language neither unpacks tuples nor joins conditions of two times.)
"""RMSNorm or LayerNorm of queries or keys, per head or across heads, and rotary positions (RoPE): the Triton kernels.

A token's heads lie in tiles [HEADS, PAIRS] of pairs (lo, hi) that RoPE turns by the token's angles: neighbours where
INTERLEAVED, else the two halves of a head. A program takes a run of tokens; the angles are read once for all heads.
"""

import triton
import triton.language as tl


@triton.jit
def _load_pairs(base, head_stride, first, heads, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """Pairs of heads first to first + HEADS, as two fp32 tiles [HEADS, PAIRS]; what is not there is 0."""
    head = first + tl.arange(0, HEADS)
    if INTERLEAVED:
        lane = tl.arange(0, 2 * PAIRS)
        there = (head < heads)[:, None] & (lane < D)[None, :]
        both = tl.load(base + head[:, None] * head_stride + lane[None, :], mask=there, other=0.0).to(tl.float32)
        lo, hi = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)
        there = (head < heads)[:, None] & (pair < D // 2)[None, :]
        at = base + head[:, None] * head_stride + pair[None, :]
        lo = tl.load(at, mask=there, other=0.0).to(tl.float32)
        hi = tl.load(at + D // 2, mask=there, other=0.0).to(tl.float32)
    return lo, hi


@triton.jit
def _store_pairs(base, head_stride, first, heads, lo, hi, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    head = first + tl.arange(0, HEADS)
    if INTERLEAVED:
        lane = tl.arange(0, 2 * PAIRS)
        there = (head < heads)[:, None] & (lane < D)[None, :]
        both = tl.reshape(tl.join(lo, hi), [HEADS, 2 * PAIRS])
        tl.store(base + head[:, None] * head_stride + lane[None, :], both.to(base.dtype.element_ty), mask=there)
    else:
        pair = tl.arange(0, PAIRS)
        there = (head < heads)[:, None] & (pair < D // 2)[None, :]
        at = base + head[:, None] * head_stride + pair[None, :]
        tl.store(at, lo.to(base.dtype.element_ty), mask=there)
        tl.store(at + D // 2, hi.to(base.dtype.element_ty), mask=there)


@triton.jit
def _angles(table, position, D: tl.constexpr, PAIRS: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A token's row of a table for both places of a pair: two values where the table is WIDE, else one."""
    if WIDE:
        lo, hi = _load_pairs(table + position * D, 0, 0, 1, D, 1, PAIRS, INTERLEAVED)
    else:
        pair = tl.arange(0, PAIRS)
        lo = tl.load(table + position * (D // 2) + pair, mask=pair < D // 2, other=0.0).to(tl.float32)[None, :]
        hi = lo
    return lo, hi


@triton.jit
def _mean(tiles_lo, tiles_hi, size, TILES: tl.constexpr, ACROSS: tl.constexpr):
    """Per head [HEADS, 1] as a tuple, or across heads the same number in each place."""
    means = ()
    if ACROSS:
        # tile on tile first: one reduction, and its barriers, instead of one for each tile
        total = tiles_lo[0] + tiles_hi[0]
        for t in tl.static_range(1, TILES):
            total += tiles_lo[t] + tiles_hi[t]
        mean = tl.sum(tl.ravel(total), 0) / size
        for _ in tl.static_range(TILES):
            means = means + (mean,)
    else:
        for t in tl.static_range(TILES):
            means = means + (tl.sum(tiles_lo[t] + tiles_hi[t], 1)[:, None] / size,)
    return means


@triton.jit(do_not_specialize=["tokens", "sequence", "positions", "run", "eps"])
def rope_forward(
    x, weight, bias, cos, sin, y, mean, rstd,
    x_batch, x_token, x_head, y_batch, y_token, y_head, tokens, sequence, positions, run, eps,
    N_HEADS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, LAYER: tl.constexpr,
    ACROSS: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (N_HEADS + HEADS - 1) // HEADS
    size = N_HEADS * D if ACROSS else D
    pair = tl.arange(0, PAIRS)
    weights = ()
    biases = ()
    # one tile of equal rows where the norm is per head
    for t in tl.static_range(TILES if ACROSS else 1):
        if weight is not None:
            weights = weights + (_load_pairs(weight, D if ACROSS else 0, t * HEADS, N_HEADS if ACROSS else HEADS, D, HEADS, PAIRS, INTERLEAVED),)  # fmt: skip
        if bias is not None:
            biases = biases + (_load_pairs(bias, D if ACROSS else 0, t * HEADS, N_HEADS if ACROSS else HEADS, D, HEADS, PAIRS, INTERLEAVED),)  # fmt: skip
    first = tl.program_id(0) * run
    for token in tl.range(first, tl.minimum(first + run, tokens), num_stages=STAGES):
        sample = token // sequence
        batch = sample.to(tl.int64)
        place = (token - sample * sequence).to(tl.int64)
        base = x + batch * x_batch + place * x_token
        los = ()
        his = ()
        for t in tl.static_range(TILES):
            lo, hi = _load_pairs(base + t * HEADS * x_head, x_head, 0, N_HEADS - t * HEADS, D, HEADS, PAIRS, INTERLEAVED)  # fmt: skip
            los = los + (lo,)
            his = his + (hi,)
        if LAYER:
            means = _mean(los, his, size, TILES, ACROSS)
            low = ()
            high = ()
            for t in tl.static_range(TILES):
                there = ((t * HEADS + tl.arange(0, HEADS)) < N_HEADS)[:, None] & (pair < D // 2)[None, :]
                low = low + (tl.where(there, los[t] - means[t], 0.0),)
                high = high + (tl.where(there, his[t] - means[t], 0.0),)
            los = low
            his = high
        low = ()
        high = ()
        for t in tl.static_range(TILES):
            low = low + (los[t] * los[t],)
            high = high + (his[t] * his[t],)
        variances = _mean(low, high, size, TILES, ACROSS)
        if cos is not None:
            position = tl.where(positions == sequence, place, tl.cast(token, tl.int64))
            cos_lo, cos_hi = _angles(cos, position, D, PAIRS, WIDE, INTERLEAVED)
            sin_lo, sin_hi = _angles(sin, position, D, PAIRS, WIDE, INTERLEAVED)
        target = y + batch * y_batch + place * y_token
        for t in tl.static_range(TILES):
            inverse = tl.rsqrt(variances[t] + eps)
            lo = los[t] * inverse
            hi = his[t] * inverse
            if weight is not None:
                lo = lo * weights[t if ACROSS else 0][0]
                hi = hi * weights[t if ACROSS else 0][1]
            if bias is not None:
                lo = lo + biases[t if ACROSS else 0][0]
                hi = hi + biases[t if ACROSS else 0][1]
            if cos is not None:
                lo, hi = lo * cos_lo - hi * sin_lo, hi * cos_hi + lo * sin_hi
            _store_pairs(target + t * HEADS * y_head, y_head, 0, N_HEADS - t * HEADS, lo, hi, D, HEADS, PAIRS, INTERLEAVED)  # fmt: skip
            if not ACROSS:
                head = t * HEADS + tl.arange(0, HEADS)
                tl.store(
                    rstd + tl.cast(token, tl.int64) * N_HEADS + head[:, None], inverse, mask=(head < N_HEADS)[:, None]
                )
                if LAYER:
                    tl.store(
                        mean + tl.cast(token, tl.int64) * N_HEADS + head[:, None],
                        means[t],
                        mask=(head < N_HEADS)[:, None],
                    )
        if ACROSS:
            tl.store(rstd + token, tl.rsqrt(variances[0] + eps))
            if LAYER:
                tl.store(mean + token, means[0])


@triton.jit(do_not_specialize=["tokens", "sequence", "positions", "run"])
def rope_backward(
    dy, x, mean, rstd, weight, cos, sin, dx, partials,
    dy_batch, dy_token, dy_head, x_batch, x_token, x_head, dx_batch, dx_token, dx_head, tokens, sequence, positions, run,
    N_HEADS: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, LAYER: tl.constexpr,
    ACROSS: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SUM_PRODUCT: tl.constexpr, SUM_GRAD: tl.constexpr,
):  # fmt: skip
    """dx, and partials [program, sums, N_HEADS * D or D] of the column sums for weight and bias."""
    TILES: tl.constexpr = (N_HEADS + HEADS - 1) // HEADS
    SUMS: tl.constexpr = TILES if ACROSS else 1
    size = N_HEADS * D if ACROSS else D
    weights = ()
    for t in tl.static_range(TILES if ACROSS else 1):
        if weight is not None:
            weights = weights + (_load_pairs(weight, D if ACROSS else 0, t * HEADS, N_HEADS if ACROSS else HEADS, D, HEADS, PAIRS, INTERLEAVED),)  # fmt: skip
    products = ()
    grads = ()
    for _ in tl.static_range(SUMS):
        products = products + (tl.zeros([HEADS, PAIRS], tl.float32), tl.zeros([HEADS, PAIRS], tl.float32))
        grads = grads + (tl.zeros([HEADS, PAIRS], tl.float32), tl.zeros([HEADS, PAIRS], tl.float32))
    first = tl.program_id(0) * run
    for token in tl.range(first, tl.minimum(first + run, tokens), num_stages=STAGES):
        sample = token // sequence
        batch = sample.to(tl.int64)
        place = (token - sample * sequence).to(tl.int64)
        x_base = x + batch * x_batch + place * x_token
        dy_base = dy + batch * dy_batch + place * dy_token
        if cos is not None:
            position = tl.where(positions == sequence, place, tl.cast(token, tl.int64))
            cos_lo, cos_hi = _angles(cos, position, D, PAIRS, WIDE, INTERLEAVED)
            sin_lo, sin_hi = _angles(sin, position, D, PAIRS, WIDE, INTERLEAVED)
        los = ()
        his = ()
        inner_lo = ()
        inner_hi = ()
        inverses = ()
        new_products = ()
        new_grads = ()
        for t in tl.static_range(TILES):
            left = N_HEADS - t * HEADS
            lo, hi = _load_pairs(x_base + t * HEADS * x_head, x_head, 0, left, D, HEADS, PAIRS, INTERLEAVED)
            g_lo, g_hi = _load_pairs(dy_base + t * HEADS * dy_head, dy_head, 0, left, D, HEADS, PAIRS, INTERLEAVED)
            if cos is not None:
                g_lo, g_hi = g_lo * cos_lo + g_hi * sin_hi, g_hi * cos_hi - g_lo * sin_lo
            if ACROSS:
                inverse = tl.load(rstd + token)
                if LAYER:
                    center = tl.load(mean + token)
                    lo = lo - center
                    hi = hi - center
            else:
                head = t * HEADS + tl.arange(0, HEADS)
                inverse = tl.load(rstd + tl.cast(token, tl.int64) * N_HEADS + head, mask=head < N_HEADS, other=0.0)[
                    :, None
                ]
                if LAYER:
                    center = tl.load(mean + tl.cast(token, tl.int64) * N_HEADS + head, mask=head < N_HEADS, other=0.0)[
                        :, None
                    ]
                    lo = lo - center
                    hi = hi - center
            lo = lo * inverse
            hi = hi * inverse
            if ACROSS:
                new_products = new_products + (products[2 * t] + g_lo * lo, products[2 * t + 1] + g_hi * hi)
                new_grads = new_grads + (grads[2 * t] + g_lo, grads[2 * t + 1] + g_hi)
            else:
                products = (products[0] + g_lo * lo, products[1] + g_hi * hi)
                grads = (grads[0] + g_lo, grads[1] + g_hi)
            if weight is not None:
                g_lo = g_lo * weights[t if ACROSS else 0][0]
                g_hi = g_hi * weights[t if ACROSS else 0][1]
            los = los + (lo,)
            his = his + (hi,)
            inner_lo = inner_lo + (g_lo,)
            inner_hi = inner_hi + (g_hi,)
            inverses = inverses + (inverse,)
        if ACROSS:
            products = new_products
            grads = new_grads
        along_lo = ()
        along_hi = ()
        for t in tl.static_range(TILES):
            along_lo = along_lo + (inner_lo[t] * los[t],)
            along_hi = along_hi + (inner_hi[t] * his[t],)
        slopes = _mean(along_lo, along_hi, size, TILES, ACROSS)
        if LAYER:
            levels = _mean(inner_lo, inner_hi, size, TILES, ACROSS)
        target = dx + batch * dx_batch + place * dx_token
        for t in tl.static_range(TILES):
            lo = inner_lo[t] - los[t] * slopes[t]
            hi = inner_hi[t] - his[t] * slopes[t]
            if LAYER:
                lo = lo - levels[t]
                hi = hi - levels[t]
            lo = lo * inverses[t]
            hi = hi * inverses[t]
            _store_pairs(target + t * HEADS * dx_head, dx_head, 0, N_HEADS - t * HEADS, lo, hi, D, HEADS, PAIRS, INTERLEAVED)  # fmt: skip
    WIDTH: tl.constexpr = N_HEADS * D if ACROSS else D
    target = partials + tl.program_id(0).to(tl.int64) * (SUM_PRODUCT + SUM_GRAD) * WIDTH
    if ACROSS:
        for t in tl.static_range(TILES):
            at = target + t * HEADS * D
            if SUM_PRODUCT:
                _store_pairs(at, D, 0, N_HEADS - t * HEADS, products[2 * t], products[2 * t + 1], D, HEADS, PAIRS, INTERLEAVED)  # fmt: skip
            if SUM_GRAD:
                _store_pairs(at + SUM_PRODUCT * WIDTH, D, 0, N_HEADS - t * HEADS, grads[2 * t], grads[2 * t + 1], D, HEADS, PAIRS, INTERLEAVED)  # fmt: skip
    else:
        if SUM_PRODUCT:
            _store_pairs(target, D, 0, 1, tl.sum(products[0], 0)[None, :], tl.sum(products[1], 0)[None, :], D, 1, PAIRS, INTERLEAVED)  # fmt: skip
        if SUM_GRAD:
            _store_pairs(target + SUM_PRODUCT * WIDTH, D, 0, 1, tl.sum(grads[0], 0)[None, :], tl.sum(grads[1], 0)[None, :], D, 1, PAIRS, INTERLEAVED)  # fmt: skip
