"""Runs of gradients that are all-reduced or reduce-scattered as one flat tensor, and how large they are for a link.

Gradients of fp32 are summed as they are. Those of lower precision travel as they are too, but are summed in fp32: each
rank is sent all ranks' parts of its share, adds them up, and sends the sum round. So a sum is rounded once, however
many ranks it is over, where a ring rounds once a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.cluster.topology import group_link
from arachnec.ir.nodes import Cluster
from arachnec.model_state.kept_gradients import gradient_dtype, gradient_of, set_gradient
from arachnec.model_state.parameter_parts import Parts
from arachnec.runtime.collectives import all_gather_flat, start_reduce_scatter_flat

SMALLEST_PIECE, LARGEST_PIECE = 4 * 2**20, 256 * 2**20  # bytes
EXCHANGED = 2  # pieces of low precision under way at most: each takes its size once more
LATENCY_SHARE = 0.05  # of a piece's time, that may go into the latency of its messages


@dataclass
class Piece:
    """Gradients on their way in one flat tensor."""

    flat: Tensor
    group: dist.ProcessGroup
    work: dist.Work
    parts: Tensor | None  # of this rank's share, from all ranks; None where the all-reduce adds up, and when done

    @classmethod
    @torch.no_grad()
    def sent(cls, values: list[Tensor], group: dist.ProcessGroup) -> Piece:
        """Start the all-reduce of these parameters' gradients, which become views of the flat tensor."""
        gradients = [_gradient(value) for value in values]
        size = sum(gradient.numel() for gradient in gradients)
        exact = gradients[0].dtype.itemsize >= 4
        padding = 0 if exact else -size % dist.get_world_size(group)
        tail = [gradients[0].new_zeros(padding)] if padding else []
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), *tail])
        # The parts of the sum take the place of the gradients, which are not needed any more.
        for value, part in zip(values, torch.split(flat[:size], [value.numel() for value in values]), strict=True):
            set_gradient(value, part.view_as(value))
        if exact:
            return cls(flat, group, _work(dist.all_reduce(flat, group=group, async_op=True)), None)
        parts = torch.empty_like(flat)
        return cls(flat, group, _work(dist.all_to_all_single(parts, flat, group=group, async_op=True)), parts)

    @property
    def done(self) -> bool:
        return self.work.is_completed()

    @property
    def doubled(self) -> bool:
        """Whether what comes has memory beside what is sent."""
        return self.parts is not None

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Wait, on the current stream of a device that has streams; the gradients are whole then, and no parts."""
        self.work.wait()
        if self.parts is not None:
            share = self.parts.view(dist.get_world_size(self.group), -1).sum(0, dtype=torch.float32)
            all_gather_flat(self.flat, share.to(self.flat.dtype), self.group)
            self.parts = None
        return []


@dataclass
class ScatteredPiece:
    """Gradients on their way in one flat tensor, of whose sum every rank gets its parts only.

    Half the bytes of an all-reduce. Those of lower precision than fp32 are sent to the rank that they are for, which
    adds them up in fp32 and rounds nothing.
    """

    values: list[Tensor]
    cut: Parts
    rows: Tensor | None  # what is sent: alive until it has arrived
    work: dist.Work
    taken: Tensor  # this rank's row of the sum, or until then its row from every rank

    @classmethod
    @torch.no_grad()
    def sent(cls, values: list[Tensor], group: dist.ProcessGroup) -> ScatteredPiece:
        """Start the reduce-scatter of these parameters' gradients, which are given up."""
        cut = Parts.of(group)
        rows = cut.packed([_gradient(value) for value in values])
        for value in values:
            set_gradient(value, None)
        if rows.dtype.itemsize >= 4:
            taken = torch.empty_like(rows[0])
            return cls(values, cut, rows, start_reduce_scatter_flat(taken, rows.view(-1), group), taken)
        taken = torch.empty_like(rows)
        return cls(values, cut, rows, _work(dist.all_to_all_single(taken, rows, group=group, async_op=True)), taken)

    @property
    def done(self) -> bool:
        return self.work.is_completed()

    @property
    def doubled(self) -> bool:
        """Whether what comes has memory beside what is sent."""
        return self.taken.ndim > 1

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Wait, on the current stream of a device that has streams; this rank's part of every gradient, at least
        fp32."""
        self.work.wait()
        self.rows = None
        if self.taken.ndim > 1:
            self.taken = self.taken.sum(0, dtype=torch.float32)
        return self.cut.cut(self.taken, self.values)


def pieces_of(
    values: Iterable[Tensor], piece_bytes: int, dtype_of: Callable[[Tensor], torch.dtype] | None = None
) -> list[list[Tensor]]:
    """Runs of tensors of one precision and about so many bytes, the same on every rank.

    Without ``dtype_of`` the precision is that of the parameters' gradients.
    """
    dtype_of = dtype_of or gradient_dtype
    pieces: list[list[Tensor]] = []
    size = 0
    for value in values:
        if not pieces or size >= piece_bytes or dtype_of(pieces[-1][0]) != dtype_of(value):
            pieces.append([])
            size = 0
        pieces[-1].append(value)
        size += value.numel() * dtype_of(value).itemsize
    return pieces


def piece_size(cluster: Cluster | None, ranks: tuple[int, ...]) -> int:
    """Bytes of a piece, so that latency is a small part of its time on the slowest link between these ranks.

    A ring over n ranks sends 2 (n - 1) messages of 1/n of the piece each (Patarasuk and Yuan, 2009).
    """
    if cluster is None or len(ranks) < 2:
        return SMALLEST_PIECE
    link = group_link(cluster, ranks)
    bandwidth = link.inter if link.outside else link.intra
    wanted = len(ranks) * link.latency * 1e-6 * bandwidth * 1e9 / LATENCY_SHARE
    return int(min(max(wanted, SMALLEST_PIECE), LARGEST_PIECE))


def _gradient(value: Tensor) -> Tensor:
    gradient = gradient_of(value)
    return torch.zeros_like(value, dtype=gradient_dtype(value)) if gradient is None else gradient


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work
