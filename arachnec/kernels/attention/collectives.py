"""Collectives over ragged pieces: all-to-all, all-gather and reduce-scatter, on what a group's back end has.

NCCL gathers uneven pieces by itself, gloo does not, and gloo's own all-to-all works in one direction at a time. There
every pair of ranks sends and receives. No collective holds a copy of its result or of its input: pieces arrive where
they belong, or pass through a bounded buffer.

Sums are made here, in the order of the positions and in at least 32 bits, so every run gives the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

BUFFER = 1 << 26  # bytes of pieces that wait on a rank to be put in their places


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group moves tensors of this device with gloo."""
    by_device = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return by_device.get(device.type) == "gloo"


def all_gather(
    x: Tensor, dim: int, sizes: Sequence[int], ranks: tuple[int, ...], group: dist.ProcessGroup | None
) -> Tensor:
    """The pieces of all ``ranks`` joined along ``dim``, where that of ``ranks[j]`` has ``sizes[j]``; ``x`` is ours."""
    assert group is not None
    x = x.contiguous()
    shape = x.shape
    rows, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    out = x.new_empty(*shape[:dim], sum(sizes), *shape[dim + 1 :])
    if not out.numel():
        return out
    into, own = out.view(rows, sum(sizes), inner), x.view(rows, shape[dim], inner)
    step = max(1, BUFFER // max(1, sum(sizes) * inner * x.element_size()))
    for first in range(0, rows, step):
        part, target = own[first : first + step], into[first : first + step]
        if target.shape[0] == 1:  # the pieces of one row lie side by side in the result
            _gather_into(list(target[0].split_with_sizes(list(sizes))), part[0], ranks, group)
            continue
        buffer = x.new_empty(target.numel())
        lengths = [target.shape[0] * size * inner for size in sizes]
        pieces = [
            piece.view(target.shape[0], size, inner)
            for piece, size in zip(buffer.split_with_sizes(lengths), sizes, strict=True)
        ]
        _gather_into(pieces, part, ranks, group)
        torch.cat(pieces, 1, out=target)
    return out


def _gather_into(pieces: list[Tensor], own: Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
    """Every rank's piece into ``pieces``, contiguous and one behind the other in one storage."""
    if is_gloo(group, own.device):
        _gather_pairwise(pieces, own, ranks, group)
        return
    members = dist.get_process_group_ranks(group)
    if any(a.numel() != b.numel() for a, b in pairwise(pieces)):
        dist.all_gather([pieces[ranks.index(rank)] for rank in members], own, group=group)
    elif list(ranks) == members:
        whole = torch.as_strided(pieces[0], (len(pieces) * own.numel(),), (1,))
        # all_gather_into_tensor is called all_gather_single from torch 2.13 on, and warns of its old name.
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
        gather(whole, own.view(-1), group=group)
    else:  # equal pieces in another order would be gathered into a copy first
        _gather_pairwise(pieces, own, ranks, group)


def _gather_pairwise(pieces: list[Tensor], own: Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
    me, size = ranks.index(dist.get_rank()), len(ranks)
    pieces[me].copy_(own)
    before = [(me - step) % size for step in range(1, size)]
    receives = [dist.P2POp(dist.irecv, pieces[j], ranks[j], group) for j in before if pieces[j].numel()]
    sends = [dist.P2POp(dist.isend, pieces[me], ranks[j], group) for j in reversed(before) if own.numel()]
    _run([*receives, *sends])


def reduce_scatter(
    x: Tensor,
    dim: int,
    sizes: Sequence[int],
    index: int,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """The piece of ``ranks[index]``, which is this rank, of the sum of all ranks' ``x`` along ``dim``.

    Round by round, so that what waits to be summed stays within ``BUFFER``.
    """
    pieces = x.split_with_sizes(list(sizes), dim)
    out = torch.empty_like(pieces[index], memory_format=torch.contiguous_format)
    moved = len(ranks) * max(piece.numel() for piece in pieces) * x.element_size()
    rounds = max(1, min(max(sizes), -(-moved // BUFFER)))
    for number in range(rounds):
        parts = [_part(piece, dim, number, rounds) for piece in pieces]
        received = exchange([[part] for part in parts], [[parts[index].shape]] * len(ranks), ranks, group)
        _part(out, dim, number, rounds).copy_(ordered_sum([piece for (piece,) in received]))
    return out


def _part(x: Tensor, dim: int, number: int, count: int) -> Tensor:
    """Part ``number`` of ``count`` nearly equal ones along ``dim``."""
    first, end = (x.shape[dim] * n // count for n in (number, number + 1))
    return x.narrow(dim, first, end - first)


def ordered_sum(pieces: Sequence[Tensor]) -> Tensor:
    """Sum in the given order, in 32 bits at least, in the pieces' dtype."""
    total = pieces[0].to(accumulator(pieces[0].dtype), copy=True)
    for piece in pieces[1:]:
        total += piece
    return total.to(pieces[0].dtype)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum values of ``dtype`` in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def exchange(
    send: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
) -> list[list[Tensor]]:
    """One ragged all-to-all: ``send[j]`` goes to ``ranks[j]``, from which tensors of ``shapes[j]`` come.

    All tensors have one dtype and device; both sides know all shapes, so no sizes travel. What a rank sends itself is
    not copied: nobody may write to what comes.
    """
    assert group is not None
    members = [ranks.index(rank) for rank in dist.get_process_group_ranks(group)]
    me = members[dist.get_rank(group)]
    sent = [[0 if j == me else piece.numel() for piece in send[j]] for j in members]
    sizes = [[0 if j == me else math.prod(shape) for shape in shapes[j]] for j in members]
    outgoing = send[0][0].new_empty(sum(map(sum, sent)))
    incoming = outgoing.new_empty(sum(map(sum, sizes)))
    slots = iter(outgoing.split_with_sizes([size for peer in sent for size in peer]))
    for j in members:
        for piece in send[j]:
            slot = next(slots)
            if j != me:
                slot.view(piece.shape).copy_(piece)
    _all_to_all(incoming, outgoing, [sum(s) for s in sizes], [sum(s) for s in sent], group)
    received: list[list[Tensor]] = [[] for _ in ranks]
    pieces = iter(incoming.split_with_sizes([size for peer in sizes for size in peer]))
    for j in members:
        received[j] = [next(pieces) if j == me else next(pieces).view(tuple(shape)) for shape in shapes[j]]
    received[me] = [piece.reshape(tuple(shape)) for piece, shape in zip(send[me], shapes[me], strict=True)]
    return received


def _all_to_all(
    incoming: Tensor, outgoing: Tensor, taken: Sequence[int], given: Sequence[int], group: dist.ProcessGroup
) -> None:
    """``dist.all_to_all_single`` of what goes to others, and with gloo in both directions at once.

    Gloo's own announces what it waits for behind the data that it sends: of two ranks the later one's whole message
    has to arrive before the other starts, and the all-to-all takes twice the time that its links do.
    """
    if not is_gloo(group, outgoing.device):
        dist.all_to_all_single(incoming, outgoing, list(taken), list(given), group=group)
        return
    members = dist.get_process_group_ranks(group)
    me, size = dist.get_rank(group), len(members)
    into, out = incoming.split_with_sizes(list(taken)), outgoing.split_with_sizes(list(given))
    before = [(me - step) % size for step in range(1, size)]
    receives = [dist.P2POp(dist.irecv, into[j], members[j], group) for j in before if taken[j]]
    sends = [dist.P2POp(dist.isend, out[j], members[j], group) for j in reversed(before) if given[j]]
    _run([*receives, *sends])


def _run(operations: list[dist.P2POp]) -> None:
    works = dist.batch_isend_irecv(operations) if operations else []
    for work in works:
        work.wait()
