"""Tensors as rows [N, H], and which rows share a scale, shift and gate: per sample, token, or packed segment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

LEAST_SEGMENTS = 16  # segment counts are rounded up to powers of two from here: one compiled kernel each


@dataclass(frozen=True)
class RowGroups:
    """``rows`` rows in ``count`` groups of neighbours: of equal size, or by cumulative ``lengths`` [count + 1].

    ``per_row``: every row is a group, and none of the sums over groups is formed.
    """

    rows: int
    count: int
    lengths: Tensor | None = None
    per_row: bool = False

    @property
    def loops(self) -> int:
        """Groups that a kernel's programs keep apart: in ``per_row`` none, the vectors are read with each row."""
        return 1 if self.per_row else self.count

    @property
    def group_rows(self) -> int:
        return self.rows // self.loops

    @property
    def segments(self) -> int:
        return 0 if self.lengths is None else max(LEAST_SEGMENTS, 1 << (self.count - 1).bit_length())

    def run(self, slots: int) -> int:
        """Rows a program takes so that all programs fit ``slots`` at a time wherever there are more slots than groups.

        Of a packed sequence only the number of segments is known here, not their lengths, which stay on the device:
        each may end in one short run.
        """
        if self.lengths is None:
            return max(1, math.ceil(self.group_rows / max(1, slots // self.loops)))
        return max(1, math.ceil(self.rows / max(slots - self.count, slots // 2, 1)))

    def programs(self, run: int) -> int:
        """Programs that cover every run; of a packed sequence the most there can be."""
        if self.lengths is None:
            return self.loops * math.ceil(self.group_rows / run)
        return math.ceil(self.rows / run) + self.count

    def spread(self, vectors: Tensor) -> Tensor:
        """Vectors [count, H] as one row for each row: [rows, H]."""
        if self.per_row:
            return vectors
        if self.lengths is None:
            repeated = vectors[:, None, :].expand(self.count, self.group_rows, vectors.shape[1])
            return repeated.reshape(self.rows, vectors.shape[1])
        return vectors.repeat_interleave(self.lengths.diff().to(torch.int64), dim=0, output_size=self.rows)

    def sum(self, values: Tensor) -> Tensor:
        """Column sums [count, H] over each group of values [rows, H], always in the same order."""
        if self.per_row:
            return values
        if self.lengths is None:
            return values.reshape(self.count, self.group_rows, values.shape[1]).sum(1)
        parts = torch.split(values, self.lengths.diff().tolist())
        return torch.stack([part.sum(0) for part in parts])


def row_groups(rows: int, vectors: tuple[Tensor | None, ...], lengths: Tensor | None, per_row: bool) -> RowGroups:
    """The groups that vectors [G, H] speak of; all that are there have the same G."""
    if lengths is not None:
        if lengths.device.type == "cpu" and not _cover(lengths, rows):
            raise ValueError(f"cu_seqlens must rise from 0 to the {rows} rows, and is {lengths.tolist()}")
        return RowGroups(rows, lengths.shape[0] - 1, lengths)
    return RowGroups(rows, next((v.shape[0] for v in vectors if v is not None), 1), per_row=per_row)


def _cover(lengths: Tensor, rows: int) -> bool:
    return int(lengths[0]) == 0 and int(lengths[-1]) == rows and bool((lengths.diff() >= 0).all())


def group_vectors(
    x: Tensor, vectors: tuple[Tensor | None, ...], cu_seqlens: Tensor | None
) -> tuple[tuple[Tensor | None, ...], bool]:
    """Scales, shifts and gates of x [..., H] as [G, H] views, all with the same G, and whether they are per row.

    A vector's leading sizes are those of x up to some dimension and 1, or nothing, from there on: [H] and [1, H] for
    all rows, [B, H] or [B, 1, H] per sample, [B, S, H] per token; with ``cu_seqlens`` [G + 1], x is packed and they are
    [G, H].
    Raises ValueError where a shape is none of these. No size is compared but with 1 and with its own symbol, so that
    nothing here specialises a symbolic shape.
    """
    if cu_seqlens is not None and cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens is one-dimensional, and has shape {tuple(cu_seqlens.shape)}")
    leads = [None if v is None else _lead(x, v, cu_seqlens) for v in vectors]
    longest: tuple[int, ...] = ()
    for lead in leads:
        longest = lead if lead is not None and len(lead) > len(longest) else longest
    if any(lead and len(lead) != len(longest) for lead in leads):
        raise ValueError("scale, shift and gate are not of one kind: per sample, per token or per segment")
    count = math.prod(longest) if cu_seqlens is None else cu_seqlens.shape[0] - 1
    flat = tuple(
        None if v is None or lead is None else v.reshape(math.prod(lead), x.shape[-1]).expand(count, x.shape[-1])
        for v, lead in zip(vectors, leads, strict=True)
    )
    return flat, cu_seqlens is None and 0 < len(longest) == x.dim() - 1


def _lead(x: Tensor, vector: Tensor, cu_seqlens: Tensor | None) -> tuple[int, ...]:
    """The leading sizes of a vector, without the ones at their end."""
    if vector.dim() == 0 or vector.dim() > x.dim() or vector.shape[-1] != x.shape[-1]:
        raise ValueError(f"a vector of shape {tuple(vector.shape)} does not belong to rows of shape {tuple(x.shape)}")
    lead = tuple(vector.shape[:-1])
    while lead and lead[-1] == 1:
        lead = lead[:-1]
    if cu_seqlens is not None:
        fits = not lead or (len(lead) == 1 and lead[0] == cu_seqlens.shape[0] - 1)
    else:
        fits = lead == tuple(x.shape[: len(lead)])
    if not fits:
        raise ValueError(
            f"a vector of shape {tuple(vector.shape)} is neither per sample, per token nor per segment "
            f"of rows of shape {tuple(x.shape)}"
        )
    return lead


def rows_of(x: Tensor) -> Tensor:
    """x [..., H] as rows [N, H] whose last stride is 1; a view where possible."""
    return dense(x.reshape(-1, x.shape[-1]))


@overload
def dense(x: Tensor) -> Tensor: ...
@overload
def dense(x: None) -> None: ...
def dense(x: Tensor | None) -> Tensor | None:
    """x with a last stride of 1; copied only where it has another."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()
