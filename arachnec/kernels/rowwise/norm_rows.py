# mypy: ignore-errors
# ruff: noqa: E501, RUF005, SIM108
# (Triton's decorators have no types, and its language neither unpacks tuples nor joins conditions of two times.)
"""LayerNorm or RMSNorm of rows with modulation, after a gated residual or not: the Triton kernels.

h = residual + gate * branch (or h = x), n = norm(h) * weight + bias, y = n * (1 + scale) + shift. A program takes a run
of rows of one group (sample or segment), so the group's vectors are read once; in ``PER_ROW`` they are read with each row.
"""

import triton
import triton.language as tl

from arachnec.kernels.rowwise.row_tiles import add_products, add_tiles, load_tiles, run_of_rows, store_tiles, zero_tiles


@triton.jit
def _factors(weight, scale, at, H: tl.constexpr, TILE: tl.constexpr):
    """weight * (1 + scale)."""
    factors = ()
    for t in tl.static_range((H + TILE - 1) // TILE):
        lanes = t * TILE + tl.arange(0, TILE)
        factor = tl.full([TILE], 1.0, tl.float32)
        if scale is not None:
            factor += tl.load(scale + at + lanes, mask=lanes < H, other=0.0).to(tl.float32)
        if weight is not None:
            factor *= tl.load(weight + lanes, mask=lanes < H, other=0.0).to(tl.float32)
        factors = factors + (factor,)
    return factors


@triton.jit
def _offsets(bias, scale, scale_at, shift, shift_at, H: tl.constexpr, TILE: tl.constexpr):
    """bias * (1 + scale) + shift."""
    offsets = ()
    for t in tl.static_range((H + TILE - 1) // TILE):
        lanes = t * TILE + tl.arange(0, TILE)
        offset = tl.zeros([TILE], tl.float32)
        if bias is not None:
            offset += tl.load(bias + lanes, mask=lanes < H, other=0.0).to(tl.float32)
            if scale is not None:
                offset *= 1.0 + tl.load(scale + scale_at + lanes, mask=lanes < H, other=0.0).to(tl.float32)
        if shift is not None:
            offset += tl.load(shift + shift_at + lanes, mask=lanes < H, other=0.0).to(tl.float32)
        offsets = offsets + (offset,)
    return offsets


@triton.jit(do_not_specialize=["groups", "group_rows", "run", "eps"])
def norm_forward(
    x, branch, gate, weight, bias, scale, shift, lengths, h, y, mean, rstd,
    x_stride, branch_stride, gate_stride, scale_stride, shift_stride, groups, group_rows, run, eps,
    H: tl.constexpr, TILE: tl.constexpr, LAYER: tl.constexpr, PER_ROW: tl.constexpr, SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (H + TILE - 1) // TILE
    first, end, group = run_of_rows(tl.program_id(0), lengths, groups, group_rows, run, SEGMENTS)
    if not PER_ROW:
        factors = _factors(weight, scale, group.to(tl.int64) * scale_stride, H, TILE)
        offsets = _offsets(
            bias, scale, group.to(tl.int64) * scale_stride, shift, group.to(tl.int64) * shift_stride, H, TILE
        )
        if gate is not None:
            gates = load_tiles(gate + group.to(tl.int64) * gate_stride, H, TILE)
    for row in tl.range(first, end, num_stages=STAGES):
        at_row = tl.cast(row, tl.int64)
        values = load_tiles(x + at_row * x_stride, H, TILE)
        if PER_ROW:
            factors = _factors(weight, scale, at_row * scale_stride, H, TILE)
            offsets = _offsets(bias, scale, at_row * scale_stride, shift, at_row * shift_stride, H, TILE)
            if gate is not None:
                gates = load_tiles(gate + at_row * gate_stride, H, TILE)
        if branch is not None:
            added = load_tiles(branch + at_row * branch_stride, H, TILE)
            if gate is not None:
                stream = add_products(values, gates, added, TILES)
            else:
                stream = add_tiles(values, added, TILES)
            # the norm reads what the residual stream stores, as eager does
            rounded = ()
            values = ()
            for t in tl.static_range(TILES):
                rounded = rounded + (stream[t].to(h.dtype.element_ty),)
                values = values + (rounded[t].to(tl.float32),)
            store_tiles(h + at_row * H, rounded, H, TILE)
        if LAYER:
            total = values[0]
            for t in tl.static_range(1, TILES):
                total += values[t]
            center = tl.sum(total, 0) / H
            centered = ()
            for t in tl.static_range(TILES):
                lanes = t * TILE + tl.arange(0, TILE)
                centered = centered + (tl.where(lanes < H, values[t] - center, 0.0),)
            values = centered
            tl.store(mean + row, center)
        squares = values[0] * values[0]
        for t in tl.static_range(1, TILES):
            squares += values[t] * values[t]
        inverse = tl.rsqrt(tl.sum(squares, 0) / H + eps)
        tl.store(rstd + row, inverse)
        results = ()
        for t in tl.static_range(TILES):
            results = results + (values[t] * inverse * factors[t] + offsets[t],)
        store_tiles(y + at_row * H, results, H, TILE)


@triton.jit(do_not_specialize=["groups", "group_rows", "run"])
def norm_backward(
    dy, dh, h, mean, rstd, branch, gate, weight, bias, scale, lengths, dx, dbranch, dscale, dgate, partials,
    dy_stride, dh_stride, h_stride, branch_stride, gate_stride, scale_stride, groups, group_rows, run,
    H: tl.constexpr, TILE: tl.constexpr, LAYER: tl.constexpr, PER_ROW: tl.constexpr, SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr, SUM_PRODUCT: tl.constexpr, SUM_GRAD: tl.constexpr, SUM_GATE: tl.constexpr,
):  # fmt: skip
    """dx = dh + the norm's backward; dbranch = gate * dx; one read of every input.

    Over the run, in registers: the column sums of dy * xhat (SUM_PRODUCT), of dy (SUM_GRAD) and of dx * branch (SUM_GATE),
    written as partials [program, sums, H]. In PER_ROW the first two are of dy * (1 + scale), for weight and bias, and
    dscale and dgate are written row by row.
    """
    TILES: tl.constexpr = (H + TILE - 1) // TILE
    first, end, group = run_of_rows(tl.program_id(0), lengths, groups, group_rows, run, SEGMENTS)
    if not PER_ROW:
        factors = _factors(weight, scale, group.to(tl.int64) * scale_stride, H, TILE)
        if gate is not None:
            gates = load_tiles(gate + group.to(tl.int64) * gate_stride, H, TILE)
    if SUM_PRODUCT:
        products = zero_tiles(H, TILE)
    if SUM_GRAD:
        grads = zero_tiles(H, TILE)
    if SUM_GATE:
        gate_sums = zero_tiles(H, TILE)
    for row in tl.range(first, end, num_stages=STAGES):
        at_row = tl.cast(row, tl.int64)
        values = load_tiles(h + at_row * h_stride, H, TILE)
        outer = load_tiles(dy + at_row * dy_stride, H, TILE)
        inverse = tl.load(rstd + row)
        center = 0.0
        if LAYER:
            center = tl.load(mean + row)
        if PER_ROW:
            factors = _factors(weight, scale, at_row * scale_stride, H, TILE)
            if gate is not None:
                gates = load_tiles(gate + at_row * gate_stride, H, TILE)
        xhat = ()
        inner = ()
        for t in tl.static_range(TILES):
            xhat = xhat + ((values[t] - center) * inverse,)
            inner = inner + (outer[t] * factors[t],)
        if dscale is not None:
            normed = xhat
            if weight is not None:
                normed = add_products(zero_tiles(H, TILE), xhat, load_tiles(weight, H, TILE), TILES)
            if bias is not None:
                normed = add_tiles(normed, load_tiles(bias, H, TILE), TILES)
            store_tiles(dscale + at_row * H, add_products(zero_tiles(H, TILE), outer, normed, TILES), H, TILE)
        # the sums before the reductions: dy is no longer needed while these are waited for
        if PER_ROW and scale is not None and (SUM_PRODUCT or SUM_GRAD):
            outer = add_products(outer, outer, load_tiles(scale + at_row * scale_stride, H, TILE), TILES)
        if SUM_PRODUCT:
            products = add_products(products, outer, xhat, TILES)
        if SUM_GRAD:
            grads = add_tiles(grads, outer, TILES)
        along = inner[0] * xhat[0]
        for t in tl.static_range(1, TILES):
            along += inner[t] * xhat[t]
        slope = tl.sum(along, 0) / H
        level = 0.0
        if LAYER:
            total = inner[0]
            for t in tl.static_range(1, TILES):
                total += inner[t]
            level = tl.sum(total, 0) / H
        dstream = ()
        for t in tl.static_range(TILES):
            dstream = dstream + ((inner[t] - xhat[t] * slope - level) * inverse,)
        if dh is not None:
            dstream = add_tiles(dstream, load_tiles(dh + at_row * dh_stride, H, TILE), TILES)
        store_tiles(dx + at_row * H, dstream, H, TILE)
        if dbranch is not None:
            passed = ()
            for t in tl.static_range(TILES):
                passed = passed + (dstream[t] * gates[t],)
            store_tiles(dbranch + at_row * H, passed, H, TILE)
        if SUM_GATE or dgate is not None:
            added = load_tiles(branch + at_row * branch_stride, H, TILE)
            if SUM_GATE:
                gate_sums = add_products(gate_sums, dstream, added, TILES)
            if dgate is not None:
                store_tiles(dgate + at_row * H, add_products(zero_tiles(H, TILE), dstream, added, TILES), H, TILE)
    target = partials + tl.program_id(0).to(tl.int64) * (SUM_PRODUCT + SUM_GRAD + SUM_GATE) * H
    if SUM_PRODUCT:
        store_tiles(target, products, H, TILE)
    if SUM_GRAD:
        store_tiles(target + SUM_PRODUCT * H, grads, H, TILE)
    if SUM_GATE:
        store_tiles(target + (SUM_PRODUCT + SUM_GRAD) * H, gate_sums, H, TILE)
