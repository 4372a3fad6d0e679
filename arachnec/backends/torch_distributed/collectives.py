"""Collectives whose names differ between versions of torch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather_flat(everyone: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``own`` of every rank of the group, one behind the other, into the flat ``everyone``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, own, group=group)
