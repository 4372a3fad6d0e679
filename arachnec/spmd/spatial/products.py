"""Matrix products and attention. Rows are shared; what every row needs is gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from arachnec.spmd.spatial.layout import Layout, is_cut, whole
from arachnec.spmd.spatial.pointwise import brought_to
from arachnec.spmd.spatial.shape_rules import uncut
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor, local_part


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
