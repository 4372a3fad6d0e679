"""Every rank's updated parameters to all ranks, in a few all-gathers of flat tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.torch_distributed.collectives import all_gather_flat

PIECE_BYTES = 32 * 2**20  # of each rank, in one all-gather


@dataclass(frozen=True)
class Run:
    """Elements [first, end) of a parameter, which lie in a flat tensor from ``place`` on."""

    name: str
    first: int
    end: int
    place: int


@torch.no_grad()
def share_owned(parameters: Mapping[str, Tensor], owners: Mapping[str, int], piece_bytes: int = PIECE_BYTES) -> None:
    """Give every rank of the default process group each parameter as its owner has it. Collective.

    As many all-gathers for each precision as the rank that owns most has pieces.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in dict.fromkeys(value.dtype for value in parameters.values()):
        owned: list[list[str]] = [[] for _ in range(world)]
        for name, owner in owners.items():
            if parameters[name].dtype == dtype:
                owned[owner].append(name)
        length = max(1, piece_bytes // dtype.itemsize)
        sizes = {name: value.numel() for name, value in parameters.items()}
        cut = [pieces(names, sizes, length) for names in owned]
        device = next(iter(parameters.values())).device
        for number in range(max(map(len, cut))):
            length_now = max(_end(of_rank[number]) for of_rank in cut if number < len(of_rank))
            everyone = torch.empty(world * length_now, dtype=dtype, device=device)
            own = torch.zeros(length_now, dtype=dtype, device=device)
            for run in cut[rank][number] if number < len(cut[rank]) else ():
                own[run.place : run.place + run.end - run.first] = _flat(parameters[run.name])[run.first : run.end]
            all_gather_flat(everyone, own)
            for other in range(world):
                for run in cut[other][number] if other != rank and number < len(cut[other]) else ():
                    part = everyone[other * length_now + run.place :][: run.end - run.first]
                    _put(parameters[run.name], run, part)


def pieces(names: Sequence[str], sizes: Mapping[str, int], length: int) -> list[list[Run]]:
    """These parameters one behind the other, cut every ``length`` elements."""
    cut: list[list[Run]] = []
    place = length
    for name in names:
        first = 0
        while first < sizes[name]:
            if place == length:
                cut.append([])
                place = 0
            end = min(sizes[name], first + length - place)
            cut[-1].append(Run(name, first, end, place))
            place += end - first
            first = end
    return cut


def _end(runs: Sequence[Run]) -> int:
    return runs[-1].place + runs[-1].end - runs[-1].first


def _flat(value: Tensor) -> Tensor:
    return value.detach().reshape(-1)


def _put(value: Tensor, run: Run, part: Tensor) -> None:
    if value.is_contiguous():
        value.detach().view(-1)[run.first : run.end].copy_(part)
    else:
        whole = _flat(value).clone()
        whole[run.first : run.end] = part
        value.detach().copy_(whole.view(value.shape))
