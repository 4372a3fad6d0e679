"""Collectives whose names differ between versions of torch, and one on the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.kernels.attention.collectives import is_gloo


class Waited(Protocol):
    """A copy, or a collective, on its way."""

    def wait(self) -> object: ...


def all_gather_flat(everyone: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """``own`` of every rank of the group, one behind the other, into the flat ``everyone``."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, own, group=group)


def start_all_gather_flat(everyone: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Start putting ``own`` of every rank of the group into the flat ``everyone``, one behind the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = gather(everyone, own, group=group, async_op=True)
    assert work is not None
    return work


def start_all_gather_in_place(everyone: Tensor, own: Tensor, member: int, group: dist.ProcessGroup) -> Waited:
    """Start putting ``own`` of every rank of the group into the flat ``everyone``; this rank is number ``member``.

    gloo's own all-gather receives into new memory and copies that. Here every rank broadcasts its part where it lies.
    """
    if not is_gloo(group, everyone.device):
        return start_all_gather_flat(everyone, own, group)
    parts = everyone.view(dist.get_world_size(group), -1)
    parts[member].copy_(own)
    works = [dist.broadcast(part, group=group, group_src=source, async_op=True) for source, part in enumerate(parts)]
    return _AllOf(works)


@dataclass(frozen=True)
class _AllOf:
    works: Sequence[dist.Work | None]

    def wait(self) -> None:
        for work in self.works:
            if work is not None:
                work.wait()


def start_reduce_scatter_flat(own: Tensor, everyone: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Start summing the flat ``everyone`` over the ranks; ``own`` becomes this rank's equal share of the sum."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work | None = scatter(own, everyone, group=group, async_op=True)
    assert work is not None
    return work


def start_reduce_scatter_in_place(everyone: Tensor, member: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start summing the flat ``everyone`` over the ranks where it lies; the first of the two, a view of the share that
    is ``member``'s, holds its sum. What the others' shares hold then is not said.

    gloo's own reduce-scatter all-reduces a copy. Here it does so without one.
    """
    own = everyone.view(dist.get_world_size(group), -1)[member]
    if not is_gloo(group, everyone.device):
        return own, start_reduce_scatter_flat(own, everyone, group)
    work: dist.Work | None = dist.all_reduce(everyone, group=group, async_op=True)
    assert work is not None
    return own, work


def gathered_on_first(own: Tensor, ranks: tuple[int, ...]) -> Tensor | None:
    """On the first of these ranks the flat ``own`` of all, one behind the other, on the host; None elsewhere.

    Over the hosts' network; other ranks may call it.
    """
    first, *rest = ranks
    rank, value = dist.get_rank(), own.cpu().contiguous()
    if rank != first:
        if rank in rest:
            dist.send(value, first)
        return None
    others = [torch.empty_like(value) for _ in rest]
    for source, other in zip(rest, others, strict=True):
        dist.recv(other, source)
    return torch.cat([value, *others])
