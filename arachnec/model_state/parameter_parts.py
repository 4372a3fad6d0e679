"""Parameters cut into parts, one for each rank, and the flat tensors in which the parts of several travel.

Every parameter is flattened and cut into as many equal parts as there are ranks, as in FSDP (arXiv 2304.11277, section
3.2): the last part may be shorter, and in a small parameter some are empty. Packed, the parts of a rank lie in one row,
each padded to the length of the first, so that collectives that want equal shares take whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.runtime.collectives import start_all_gather_flat


@dataclass(frozen=True)
class Parts:
    """The cut over the ranks of a group, as one of them sees it."""

    ranks: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Parts:
        """Over the ranks of ``group``, or of the default process group."""
        return cls(dist.get_world_size(group), dist.get_rank(group))

    def length(self, count: int) -> int:
        """Elements of a part, of a tensor with ``count`` of them."""
        return -(-count // self.ranks)

    def own(self, value: Tensor) -> Tensor:
        """This rank's part, flat: a view of a contiguous tensor, a copy of others."""
        length = self.length(value.numel())
        return value.detach().reshape(-1)[self.rank * length :][:length]

    def packed(self, values: Sequence[Tensor]) -> Tensor:
        """(ranks, length of a row): all parts of these tensors of one precision, each padded with zeros."""
        rows = values[0].new_empty(self.ranks, sum(self.length(value.numel()) for value in values))
        for columns, value in zip(self._columns(rows, values), values, strict=True):
            whole, rest = _split(columns, value.detach().reshape(-1))
            columns[: len(whole)] = whole
            columns[len(whole) :] = 0
            if len(rest):
                columns[len(whole), : len(rest)] = rest
        return rows

    def unpack(self, rows: Tensor, values: Sequence[Tensor]) -> None:
        """Write packed parts into these tensors."""
        for columns, value in zip(self._columns(rows, values), values, strict=True):
            flat = value.detach().view(-1) if value.is_contiguous() else value.new_empty(value.numel())
            whole, rest = _split(columns, flat)
            whole.copy_(columns[: len(whole)])
            if len(rest):
                rest.copy_(columns[len(whole), : len(rest)])
            if not value.is_contiguous():
                value.detach().copy_(flat.view(value.shape))

    def cut(self, row: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of these tensors, without padding, as views of its packed ``row``."""
        lengths = [self.length(value.numel()) for value in values]
        counts = [len(range(value.numel())[self.rank * n :][:n]) for value, n in zip(values, lengths, strict=True)]
        return [part[:count] for part, count in zip(row.split_with_sizes(lengths), counts, strict=True)]

    def _columns(self, rows: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(rows.split_with_sizes([self.length(value.numel()) for value in values], 1))


def _split(columns: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The whole parts of a flat tensor as rows, and the shorter one behind them."""
    length = columns.shape[1]
    whole = len(flat) // length if length else 0
    return flat[: whole * length].view(whole, length), flat[whole * length :]


@dataclass(frozen=True)
class GatheredParts:
    """All ranks' parts of some tensors on their way to this rank."""

    parts: Parts
    values: Sequence[Tensor]
    rows: Tensor  # what is sent is this rank's row of it
    work: dist.Work

    @classmethod
    @torch.no_grad()
    def started(
        cls, parts: Parts, values: Sequence[Tensor], own: Sequence[Tensor], group: dist.ProcessGroup | None = None
    ) -> GatheredParts:
        """For these tensors of one precision; ``own`` are this rank's parts. Collective, of one message.

        A part of another precision than its tensor is rounded.
        """
        rows = values[0].new_empty(parts.ranks, sum(parts.length(value.numel()) for value in values))
        row = rows[parts.rank].zero_()
        for place, part in zip(parts.cut(row, values), own, strict=True):
            place.copy_(part)
        return cls(parts, values, rows, start_all_gather_flat(rows.view(-1), row, group))

    @torch.no_grad()
    def wait(self) -> None:
        """Write the parts into the tensors. On a device with streams its stream waits, and not the host."""
        self.work.wait()
        self.parts.unpack(self.rows, self.values)


def own_parts(parts: Parts, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor, by name; those that are empty here are left out."""
    own = {name: parts.own(value) for name, value in values.items()}
    return {name: part for name, part in own.items() if part.numel()}
