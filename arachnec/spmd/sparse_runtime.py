"""Functions that a block's graph calls for attention over video tokens, on all of them or on a rank's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from arachnec.kernels.attention.distributed_attention import KeyFetch, distributed_attention
from arachnec.kernels.attention.divided_heads import Division, HeadShare
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.spmd.runtime import Parts

Shares = tuple[HeadShare, ...]


class BlockAttention(Protocol):
    """What the attentions of one block are given."""

    def attend(
        self, site: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, heads: Shares
    ) -> Tensor: ...

    def division(self, site: int, tokens: int, places: int) -> Division | None: ...

    def fetch(self, site: int, tokens: int, ranks: Sequence[int]) -> KeyFetch | None: ...


def attention_of_all(
    layers: BlockAttention,
    site: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the place of ``scaled_dot_product_attention`` of heads [B, H, S, D]; dropout and causality never happen."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return layers.attend(site, query, key, value, attn_mask, scale, tuple(map(HeadShare, range(query.shape[1]))))


def attention_of_share(
    layers: BlockAttention,
    site: int,
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
    """In the place of ``attention_over_tokens``: a rank has all keys of some heads when it attends."""

    def of_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, heads: Shares) -> Tensor:
        return layers.attend(site, query, key, value, mask, scale, heads)

    mask = mask if mask is None else mask[(None,) * (4 - mask.ndim)]
    tokens = sum(shard.total if part is None else part for part in key_parts)
    return distributed_attention(
        query,
        key,
        value,
        shard,
        query_parts=query_parts,
        key_parts=key_parts,
        mask=mask,
        scale=scale,
        local=of_heads,
        division=layers.division(site, tokens, shard.degree),
        fetch=layers.fetch(site, tokens, shard.ranks),
    )
