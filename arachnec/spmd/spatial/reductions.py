"""Operators that put entries together: matrix products, attention, norms and reductions of shared tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arachnec.kernels.attention.collectives import accumulator
from arachnec.spmd.spatial.layout import Layout, is_cut, whole
from arachnec.spmd.spatial.pointwise import brought_to
from arachnec.spmd.spatial.shape_rules import uncut
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor, local_part

ATEN = torch.ops.aten


def of_all_ranks(x: SplitTensor, own: Tensor) -> list[tuple[int, Tensor]]:
    """What every rank has of a small tensor, with its index, of the ranks that hold different parts of ``x``.

    In the order of ranks, so that everybody sums alike. Collective.
    """
    spread = x.spread
    mine = spread.places(x.place)
    own = own.contiguous()
    everyone = x.sharing.peers.exchange(
        [own.new_empty(0) if rank == x.place else own for rank in range(spread.ranks)],
        [(0,) if rank == x.place else own.shape for rank in range(spread.ranks)],
    )
    return [
        (rank, own if rank == x.place else everyone[rank])
        for rank in range(spread.ranks)
        if all(
            a == b for axis, (a, b) in enumerate(zip(spread.places(rank), mine, strict=True)) if axis not in spread.axes
        )
    ]


def group_norm(
    operator: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n: int,
    c: int,
    _: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(x, SplitTensor)
    rest = uncut(x, 0, 1)
    if not isinstance(rest, SplitTensor):
        return operator(rest, weight, bias, n, c, rest[0, 0].numel(), groups, eps)  # type: ignore[no-any-return]
    mean, variance = _moments(rest, n, groups)
    by_channel = [value.repeat_interleave(c // groups, dim=1).reshape(n * c) for value in (mean, variance)]
    affine = [None if w is None else w.to(mean.dtype).repeat(n) for w in (weight, bias)]
    local = rest.local
    if local.numel():
        flat = local.reshape(1, n * c, -1)
        local = F.batch_norm(flat, by_channel[0], by_channel[1], affine[0], affine[1], False, 0.0, eps)
    return rest.like(local.reshape(rest.local.shape)), mean, (variance + eps).rsqrt()


def _moments(x: SplitTensor, n: int, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of every group, merged from those of the ranks (Chan, Golub and LeVeque, 1983)."""
    spread = x.spread
    here = x.local.reshape(n, groups, -1).to(accumulator(x.dtype))
    if here.shape[2]:
        variance, mean = torch.var_mean(here, 2, correction=0)
    else:
        variance = mean = here.new_zeros(n, groups)
    parts = of_all_ranks(x, torch.stack([mean, variance]))
    counts = [math.prod(spread.local_shape(rank)) / (n * groups) for rank, _ in parts]
    total = math.fsum(counts)
    shares = [count / total for count in counts]
    mean = _weighted([part[0] for _, part in parts], shares)
    spreads = [part[1] + (part[0] - mean).square() for _, part in parts]
    return mean, _weighted(spreads, shares)


def _weighted(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total = total + value * share
    return total


def trailing_norm(operator: Any, x: Tensor, shape: Sequence[int], *args: Any) -> Any:
    """Layer norm and RMS norm: whole along the dimensions that they normalise."""
    assert isinstance(x, SplitTensor)
    rest = uncut(x, *range(x.dim() - len(shape), x.dim()))
    if not isinstance(rest, SplitTensor):
        return operator(rest, shape, *args)
    first, *others = operator(rest.local, shape, *args)
    dims = (*rest.spread.dims[: x.dim() - len(shape)], *[()] * len(shape))
    return rest.like(first), *(rest.like(other, replace(rest.spread, dims=dims)) for other in others)


def running_norm(operator: Any, x: Tensor, *args: Any) -> Any:
    """Batch norm with the statistics it was trained with."""
    if operator.overloadpacket is ATEN.native_batch_norm and args[4]:
        raise NotDivisible("it calls a batch norm in training")
    assert isinstance(x, SplitTensor)
    rest = uncut(x, 1)
    if not isinstance(rest, SplitTensor):
        return operator(rest, *args)
    first, *others = operator(rest.local, *args)
    return rest.like(first), *others


def reduction(operator: Any, x: SplitTensor, dims: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """``mean``, ``sum``, ``amax`` and ``amin`` over some dimensions."""
    listed = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    over = sorted(position % x.dim() for position in listed)
    axes = frozenset(f.axis for position in over for f in x.spread.dims[position] if f.axis is not None)
    spread = _reduced(x, over, keepdim)
    packet = operator.overloadpacket
    if not axes:
        return x.like(operator(x.local, over, keepdim, **kwargs), spread)
    if packet in (ATEN.sum, ATEN.mean) and x.dtype.is_floating_point and spread.axes == frozenset():
        own = x.local.sum(over, keepdim, dtype=accumulator(x.dtype))
        total = _weighted(*zip(*((part, 1.0) for _, part in of_all_ranks(x, own)), strict=True))
        if packet is ATEN.mean:
            total = total / math.prod(x.shape[position] for position in over)
        return total.to(kwargs.get("dtype") or x.dtype)
    rest = x.gathered(axes)
    return operator(rest, over, keepdim, **kwargs)  # type: ignore[no-any-return]


def vector_norm(
    operator: Any, x: SplitTensor, order: float = 2, dims: Sequence[int] | None = None, keepdim: bool = False, **kw: Any
) -> Tensor:
    over = [position % x.dim() for position in (dims if dims is not None else range(x.dim()))]
    rest = uncut(x, *over)
    if not isinstance(rest, SplitTensor):
        return operator(rest, order, dims, keepdim, **kw)  # type: ignore[no-any-return]
    return rest.like(operator(rest.local, order, over, keepdim, **kw), _reduced(rest, over, keepdim))


def _reduced(x: SplitTensor, over: Sequence[int], keepdim: bool) -> Layout:
    dims = [() if p in over else dim for p, dim in enumerate(x.spread.dims) if keepdim or p not in over]
    return replace(x.spread, dims=tuple(dims))


def moments(operator: Any, x: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """``var`` and ``var_mean``: of what is cut, by everybody in full."""
    over = [x.dim() - 1] if not args else args[0]
    listed = list(range(x.dim())) if over is None else [over] if isinstance(over, int) else list(over)
    if not any(is_cut(x.spread.dims[position]) for position in listed):
        spread = _reduced(x, [p % x.dim() for p in listed], bool(kwargs.get("keepdim", False)))
        result = operator(x.local, *args, **kwargs)
        return x.like(result, spread) if isinstance(result, Tensor) else tuple(x.like(r, spread) for r in result)
    return operator(x.gathered(), *args, **kwargs)


def matrix_product(operator: Any, a: Tensor, b: Tensor) -> Tensor:
    """``mm`` and ``bmm``: rows of ``a`` and, where they are many, matrices."""
    return _product(a, b, lambda x, y, _: operator(x, y))


def matrix_product_and(operator: Any, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """``addmm`` and ``baddbmm``."""
    if isinstance(bias, SplitTensor):
        bias = bias.gathered()
    return _product(a, b, lambda x, y, part: operator(part(bias), x, y, **kwargs))


def _product(a: Tensor, b: Tensor, run: Any) -> Tensor:
    a = uncut(a, -1)
    if not isinstance(a, SplitTensor):
        b = b.gathered() if isinstance(b, SplitTensor) else b
        return run(a, b, lambda bias: bias)  # type: ignore[no-any-return]
    b = uncut(b, -1, -2)
    batch = a.spread.dims[:-2]
    b = brought_to(b, Layout((*batch, *(whole(size) for size in b.shape[-2:])), a.spread.grid), a)
    spread = a.spread.with_dim(a.dim() - 1, whole(b.shape[-1]))
    index = a.place

    def part(bias: Tensor) -> Tensor:
        return local_part(bias, Layout(spread.dims[len(spread.dims) - bias.dim() :], spread.grid), index)

    return a.like(run(a.local, b, part), spread)


def linear(operator: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, SplitTensor) or isinstance(bias, SplitTensor):
        raise NotDivisible("the weights of a linear layer are computed from what its ranks share")
    rest = uncut(x, -1)
    if not isinstance(rest, SplitTensor):
        return operator(rest, weight, bias)  # type: ignore[no-any-return]
    local = operator(rest.local, weight, bias)
    return rest.like(local, rest.spread.with_dim(rest.dim() - 1, whole(weight.shape[0])))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Scaled dot-product attention: every rank has its queries, and all keys and values."""
    query = uncut(query, -1, *([-2] if is_causal else []))
    key, value = uncut(key, -1, -2), uncut(value, -1, -2)
    if isinstance(attn_mask, SplitTensor):
        attn_mask = attn_mask.gathered()
    if not isinstance(query, SplitTensor):
        key, value = (x.gathered() if isinstance(x, SplitTensor) else x for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    batch, grid, like = query.spread.dims[:-2], query.spread.grid, query
    if kwargs.get("enable_gqa") and any(map(is_cut, batch)):
        raise NotDivisible("it calls attention of grouped heads, and shares the heads")
    keys, values = (
        brought_to(x, Layout((*batch[len(batch) + 2 - x.dim() :], *map(whole, x.shape[-2:])), grid), like)
        for x in (key, value)
    )
    spread = query.spread.with_dim(query.dim() - 1, whole(value.shape[-1]))
    shape = spread.local_shape(like.place)
    if 0 in shape:
        return like.like(query.local.new_empty(shape), spread)
    if attn_mask is not None:
        rows = (*batch, query.spread.dims[-2], whole(attn_mask.shape[-1]))
        attn_mask = brought_to(attn_mask, Layout(rows[len(rows) - attn_mask.dim() :], grid), like)
    local = F.scaled_dot_product_attention(query.local, keys, values, attn_mask, dropout_p, is_causal, **kwargs)
    return like.like(local, spread)
