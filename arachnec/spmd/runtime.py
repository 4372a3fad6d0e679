"""Functions that a sharded graph calls: slices and gathers of dimensions made of parts, and distributed attention.

``parts`` of a dimension are in order: None is the sharded sequence, a number that many replicated positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.kernels.attention.distributed_attention import distributed_attention
from arachnec.kernels.attention.exchange import Dealt, gather_tokens, shard_tokens
from arachnec.kernels.attention.exchange import redistribute as dealt_anew
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split

Parts = tuple[int | None, ...]
Move = Callable[[Tensor, int, SequenceShard], Tensor]
Factors = tuple[int, int, int]  # outer, the length that is dealt out, inner


def shard_of_length(shard: SequenceShard, length: int) -> SequenceShard:
    """Other positions than the clip's tokens over the same ranks: frames, or places."""
    return shard if length == shard.total else replace(shard, tokens=even_split(length, shard.degree))


def redistribute(x: Tensor, dim: int, shard: SequenceShard, before: Factors, after: Factors) -> Tensor:
    """This rank's positions of ``after`` from those of ``before``; see ``kernels.attention.redistribution``."""
    first, then = (
        Dealt(outer, shard_of_length(shard, length).tokens, inner) for outer, length, inner in (before, after)
    )
    return dealt_anew(x, dim, first, then, shard)


def written(target: Tensor, source: Tensor) -> Tensor:
    """``aten.copy``, what functionalisation makes of ``target.copy_(source)``, with the derivative that it lacks."""
    return source.to(target).expand_as(target)


def shard_parts(x: Tensor, dim: int, shard: SequenceShard, parts: Parts, outer: int = 1, inner: int = 1) -> Tensor:
    """This rank's positions of a replicated ``x`` whose dimension ``dim`` is outer x parts x inner."""
    return _moved(shard_tokens, shard.total, x, dim, shard, parts, outer, inner)


def gather_parts(x: Tensor, dim: int, shard: SequenceShard, parts: Parts, outer: int = 1, inner: int = 1) -> Tensor:
    """The inverse of ``shard_parts``, on every rank."""
    return _moved(gather_tokens, shard.local, x, dim, shard, parts, outer, inner)


def _moved(move: Move, sharded: int, x: Tensor, dim: int, shard: SequenceShard, parts: Parts, *merged: int) -> Tensor:
    """``x`` with its ``sharded`` positions moved, where ``merged`` stand around its parts in dimension ``dim``."""
    if parts == (None,) and merged == (1, 1):
        return move(x, dim, shard)
    lengths = [sharded if part is None else part for part in parts]
    outer, inner = merged
    split = x.reshape(*x.shape[:dim], outer, sum(lengths), inner, *x.shape[dim + 1 :])
    pieces = torch.split(split, lengths, dim + 1)
    moved = [move(p, dim + 1, shard) if part is None else p for p, part in zip(pieces, parts, strict=True)]
    return torch.cat(moved, dim + 1).flatten(dim, dim + 2)


def attention_over_tokens(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    shard: SequenceShard,
    query_parts: Parts,
    key_parts: Parts,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """``scaled_dot_product_attention`` of local tokens over the whole sequence: [B, H, L, D], or [B, L, D].

    A mask that needs a gradient (a trained bias on the scores) takes a path of its own: distributed attention gives
    masks none.
    """
    headless = query.ndim == 3
    if headless:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if mask is not None:
        mask = mask.unsqueeze(1) if headless and mask.ndim == 3 else mask
        mask = mask[(None,) * (4 - mask.ndim)]
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        output = _biased_attention(query, key, value, mask, shard, query_parts, key_parts, scale, enable_gqa)
        return output.squeeze(1) if headless else output
    output = distributed_attention(
        query,
        key,
        value,
        shard,
        query_parts=query_parts,
        key_parts=key_parts,
        mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return output.squeeze(1) if headless else output


def _biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    shard: SequenceShard,
    query_parts: Parts,
    key_parts: Parts,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """This rank's queries with their rows of the mask against all keys, gathered."""
    key, value = (gather_parts(x, 2, shard, key_parts) for x in (key, value))
    if mask.shape[2] > 1:
        mask = shard_parts(mask, 2, shard, query_parts)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
