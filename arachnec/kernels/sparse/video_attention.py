"""Attention over a clip's tokens by the path that was chosen: dense as it was, or over predicted lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.kernels.sparse.critical_keys import critical_keys
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.predictor import Projections, cell_features
from arachnec.kernels.sparse.sparse_attention import sparse_attention
from arachnec.kernels.sparse.token_cubes import TokenCubes, order_on


def video_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cubes: TokenCubes,
    lists: KeyLists | None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of heads [B, H, S, D] in the sequence's own order; None for lists, or full ones, is the dense path.

    The dense path is ``scaled_dot_product_attention`` and nothing else.
    """
    if lists is None or is_full(lists, cubes):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
    return sparse_attention(query, key, value, lists, cubes, mask=mask, scale=scale)


def predicted_lists(
    query: Tensor,
    key: Tensor,
    projections: Projections,
    cubes: TokenCubes,
    kept: Sequence[int],
    spans: Sequence[tuple[int, int]] | None = None,
) -> KeyLists:
    """The lists of sources [B, H or 1, S, D] in the sequence's own order; ``spans`` as in ``critical_keys``."""
    order = order_on(cubes, query.device)[: cubes.video]
    with torch.no_grad():
        query_cells = cell_features(query.index_select(2, order), projections.query, cubes)
        key_cells = cell_features(key.index_select(2, order), projections.key, cubes)
        return critical_keys(query_cells, key_cells, cubes, kept, spans)


def is_full(lists: KeyLists, cubes: TokenCubes) -> bool:
    """Whether every list has every block; from the lengths alone."""
    return len(lists.indices) == lists.counts.numel() * (len(cubes.blocks) - 1)
