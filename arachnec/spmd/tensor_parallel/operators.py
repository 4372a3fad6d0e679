"""What ranks do that each hold some columns or rows of the weights.

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3: a product with some columns of a weight gives some columns
of the result; with some rows it gives a summand of all of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from arachnec.kernels.attention.collectives import ordered_sum
from arachnec.spmd.spatial import reductions
from arachnec.spmd.spatial.layout import Layout, is_cut, whole
from arachnec.spmd.spatial.operators import sharing
from arachnec.spmd.spatial.peers import Peers
from arachnec.spmd.spatial.pointwise import brought_to
from arachnec.spmd.spatial.split_tensor import Rule, Sharing, SplitTensor

ATEN = torch.ops.aten
Run = Callable[[Tensor, Tensor], Tensor]


def sharing_weights(peers: Peers, ranks: int) -> Sharing:
    """So many ranks in a row, with all that they know how to share."""
    base = sharing(peers, (ranks,))
    operators: dict[object, Rule] = {ATEN.mm: matrix_product, ATEN.addmm: matrix_product_and, ATEN.embedding: embedding}
    functions: dict[object, Rule] = {F.linear: linear, F.scaled_dot_product_attention: attention}
    return replace(base, operators={**base.operators, **operators}, functions={**base.functions, **functions})


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of a weight ``[columns, rows]``."""
    if not isinstance(weight, SplitTensor):
        return reductions.linear(F.linear, input, weight, bias)
    turned = weight.t()
    assert isinstance(turned, SplitTensor)
    return _plus(_product(input, turned, lambda a, b: F.linear(a, b.t())), bias)


def matrix_product(operator: Any, a: Tensor, b: Tensor) -> Tensor:
    """``mm``."""
    if not isinstance(b, SplitTensor):
        return reductions.matrix_product(operator, a, b)
    return _product(a, b, operator)


def matrix_product_and(operator: Any, bias: Tensor, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    """``addmm``."""
    if not isinstance(b, SplitTensor) or kwargs:
        return reductions.matrix_product_and(operator, bias, a, b, **kwargs)
    return _plus(_product(a, b, ATEN.mm), bias)


def embedding(operator: Any, table: Tensor, numbers: Tensor, *args: Any) -> Tensor:
    """A table by its columns; what is looked up is gathered, for it is added to what every rank has."""
    if isinstance(numbers, SplitTensor):
        numbers = numbers.gathered()
    if not isinstance(table, SplitTensor):
        return operator(table, numbers, *args)  # type: ignore[no-any-return]
    spread = Layout((*map(whole, numbers.shape), table.spread.dims[1]), table.spread.grid)
    return table.like(operator(table.local, numbers, *args), spread).gathered()


def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Scaled dot-product attention on some heads; grouped ones are written out, so that they lie as the queries do."""
    if kwargs.pop("enable_gqa", False):
        times = query.shape[-3] // key.shape[-3]
        key, value = (_repeated(x, times) for x in (key, value))
    return reductions.attention(query, key, value, *args, **kwargs)


def _repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, rows, width = x.shape
    return x[:, :, None].expand(batch, heads, times, rows, width).reshape(batch, heads * times, rows, width)


def _product(a: Tensor, b: SplitTensor, run: Run) -> Tensor:
    """``a @ b``: some columns on each rank, or all of it on every rank. Collective where ``b`` is cut by rows."""
    rows, columns = b.spread.dims
    outer = [whole(size) for size in a.shape[:-1]]
    if is_cut(rows):
        part = brought_to(a, Layout((*outer, rows), b.spread.grid), b)
        return summed(run(part, b.local), b.sharing.peers, b.spread.ranks)
    everything = a.gathered() if isinstance(a, SplitTensor) else a
    return b.like(run(everything, b.local), Layout((*outer, columns), b.spread.grid))


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def summed(x: Tensor, peers: Peers, ranks: int) -> Tensor:
    """The sum of what every rank has, on each: all add up a piece, and get the others' pieces. Collective.

    Pieces are added in the order of the ranks and in at least 32 bits, so all ranks have the same.
    """
    if ranks == 1:
        return x
    pieces = list(x.reshape(-1).tensor_split(ranks))
    own, nothing = pieces[peers.index], x.new_empty(0)
    others = [rank != peers.index for rank in range(ranks)]
    received = peers.exchange(
        [piece if other else nothing for piece, other in zip(pieces, others, strict=True)],
        [own.shape if other else (0,) for other in others],
    )
    total = ordered_sum([piece if other else own for piece, other in zip(received, others, strict=True)])
    gathered = peers.exchange(
        [total if other else nothing for other in others],
        [piece.shape if other else (0,) for piece, other in zip(pieces, others, strict=True)],
    )
    return torch.cat([piece if other else total for piece, other in zip(gathered, others, strict=True)]).view(x.shape)
