"""Attention over chosen key blocks, as an operator: forward, log-sum-exp and backward, without atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.rowwise.row_launch import on_device_of
from arachnec.kernels.sparse.block_launch import launch_backward, launch_forward, lists_of
from arachnec.kernels.sparse.gathered_attention import gathered_backward, gathered_forward, groups_of
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.token_cubes import TokenCubes, order_on


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: KeyLists,
    cubes: TokenCubes,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of each query group over the key blocks of its list; captions' queries attend to everything.

    query, key [B, H, S, D], value [B, H, S, Dv] and ``mask`` [B or 1, H or 1, S or 1, S], boolean or added to the
    scores, are in the sequence's own order. Returns [B, H, S, Dv]; a query that sees nothing gives 0. ``scale`` None
    means D ** -0.5. Raises ValueError for other sizes.
    """
    total, groups = len(cubes.order), len(cubes.groups) - 1
    batch = tuple(query.shape[:2])
    sizes = [tuple(x.shape[:3]) for x in (query, key, value)]
    if sizes != [(*batch, total)] * 3 or query.shape[3] != key.shape[3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"heads of {total} queries and keys are wanted, not {shapes}")
    if tuple(lists.counts.shape) != (*batch, groups):
        raise ValueError(f"lists of {groups} groups of {batch} are wanted, not {tuple(lists.counts.shape)}")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if query.is_cuda and query.dtype == torch.float64:
        raise ValueError("on a GPU heads have 16 or 32 bits a number, not 64")
    starts = (order_on(cubes, query.device), cubes.groups, cubes.blocks)  # where cubes start stays on the host
    out: Tensor = torch.ops.arachnec.sparse_attention(
        query, key, value, mask, lists.indices, lists.counts, *starts, scale
    )[0]
    return out


@torch.library.custom_op("arachnec::sparse_attention", mutates_args=())
def _sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    order: Tensor,
    groups: Tensor,
    blocks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the latter has no gradient."""
    if query.is_cuda:
        with on_device_of(query):
            return launch_forward(query, key, value, mask, lists_of(indices, counts, order, groups, blocks), scale)
    lists = groups_of(indices, counts, order, groups, blocks)
    return gathered_forward(query, key, value, mask, lists, scale)


@torch.library.custom_op("arachnec::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    order: Tensor,
    groups: Tensor,
    blocks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        with on_device_of(query):
            every = lists_of(indices, counts, order, groups, blocks)
            return launch_backward(grad, query, key, value, out, lse, mask, every, scale)
    lists = groups_of(indices, counts, order, groups, blocks)
    return gathered_backward(grad, query, key, value, out, lse, mask, lists, scale)


@_sparse_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    order: Tensor,
    groups: Tensor,
    blocks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


@_sparse_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    order: Tensor,
    groups: Tensor,
    blocks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *lists, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, mask, *lists)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.arachnec.sparse_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None, None, None, None, None, None)


_sparse_attention.register_autograd(_gradients, setup_context=_save)
