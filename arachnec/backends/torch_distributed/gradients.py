"""The sum of a stage's gradients over the ranks that hold a part of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 * 2**20


@torch.no_grad()
def reduce_gradients(parameters: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    """Sum every parameter's gradient over ``group``, in place, in the gradient's own precision.

    Gradients travel in flat buckets of about 25 MB, all of them under way at once. A rank whose cascades left a
    parameter without a gradient adds zeros; one that no rank has a gradient for keeps None.
    """
    values = list(parameters.values())
    if not values:
        return
    used = torch.tensor([value.grad is not None for value in values], dtype=torch.int32, device=values[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    shared = [value for value, flag in zip(values, used.tolist(), strict=True) if flag]
    pending = []
    for bucket in _buckets(shared):
        flat = torch.cat([_gradient(value).reshape(-1) for value in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        for value, part in zip(bucket, torch.split(flat, [value.numel() for value in bucket]), strict=True):
            value.grad = part.view_as(value)


def _gradient(value: Tensor) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad


def _buckets(values: Iterable[Tensor]) -> list[list[Tensor]]:
    """Runs of parameters of one dtype of about ``BUCKET_BYTES``; the same on every rank."""
    buckets: list[list[Tensor]] = []
    size = 0
    for value in values:
        if not buckets or size >= BUCKET_BYTES or buckets[-1][0].dtype != value.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(value)
        size += value.numel() * value.element_size()
    return buckets
