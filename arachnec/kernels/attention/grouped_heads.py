"""Key heads that several query heads share, repeated for the kernels, and their gradients summed.

A group of query heads is summed in 32 bits at least and in one fixed way: no atomics, and no rounding between terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arachnec.kernels.attention.collectives import accumulator

Sharing = tuple[int, ...]  # how many consecutive query heads use each key head


def spread_heads(x: Tensor, sharing: Sharing | None) -> Tensor:
    """[B, Hk, L, D] as [B, H, L, D]: each key head once for every query head that uses it."""
    if sharing is None:
        return x
    if not sharing:  # a rank without heads
        return x[:, :0]
    return torch.cat([x[:, i : i + 1].expand(-1, count, -1, -1) for i, count in enumerate(sharing)], 1)


def collect_heads(grad: Tensor, sharing: Sharing | None) -> Tensor:
    """The gradient of ``spread_heads``, [B, H, L, D] to [B, Hk, L, D]; where heads are shared, in the accumulator."""
    if sharing is None:
        return grad
    if not sharing:
        return grad[:, :0].to(accumulator(grad.dtype))
    groups = grad.split_with_sizes(sharing, 1)
    return torch.cat([group.sum(1, keepdim=True, dtype=accumulator(grad.dtype)) for group in groups], 1)
