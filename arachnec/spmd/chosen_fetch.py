"""Keys chosen before they come: what each rank of a clip gets of a sparse layer's keys and values.

In: queries of a rank's own heads, and of the keys the predicted features of cells, 1 / 64 of their bytes or less. Out:
lists as on one rank, but for the rounding of a cell's mean that two ranks hold, the key blocks that they name, and how
many rows have room on the way. docs/sparse_planning.md, "Between nodes".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.chosen_keys import Capacity
from arachnec.kernels.attention.collectives import exchange
from arachnec.kernels.attention.divided_heads import Counts, Division, HeadShare, held_ranges
from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.predictor import cell_features
from arachnec.kernels.sparse.token_cubes import TokenCubes, order_on
from arachnec.sparsity.head_shares import MARGIN, independent

Shares = tuple[HeadShare, ...]


@dataclass(frozen=True)
class Room:
    """How much room chosen keys have. ``node`` consecutive ranks are a machine, inside which all keys travel. Groups
    that chose each by itself would take 1 - (1 - density)^groups of the blocks; ``spread`` is, by head, what they took
    of that when it was last measured."""

    node: int
    spread: Sequence[float]
    margin: float = MARGIN

    def rows(self, share: HeadShare, groups: int, density: float, held: int, captions: int) -> int:
        """Of a holder's ``held`` tokens, ``captions`` among them, which always travel. All where captions ask: they
        attend to everything."""
        first, end = (0, groups) if share.end is None else (share.first, share.end)
        if captions and first == 0:
            return held
        part = self.margin * self.spread[share.head] * independent(density, end - first)
        return min(held, math.ceil(part * (held - captions)) + captions)


@dataclass(frozen=True, eq=False)
class LayerFetch:
    """The ``KeyFetch`` of a layer in one cascade. ``lists`` gives those of own shares from features of queries and
    keys, or, without features, those that are known; ``predicts`` is the same on all ranks."""

    cubes: TokenCubes
    key_projection: Tensor  # [H, D, r]
    query_projection: Tensor
    densities: Sequence[float]
    room: Room
    predicts: bool
    lists: Callable[[Tensor | None, Tensor | None, Shares], KeyLists]
    noted: list[Tensor]

    @property
    def block_of(self) -> Tensor:
        return block_of_tokens(self.cubes)

    def wanted(self, query: Tensor, key: Tensor, division: Division, counts: Counts, shard: SequenceShard) -> Tensor:
        own = division[shard.index]
        features: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.predicts:
            features = self._features(query, key, division, counts, shard)
        blocks = len(self.cubes.blocks) - 1
        if not own:
            return torch.zeros(query.shape[0], 0, blocks, dtype=torch.bool, device=query.device)
        wanted = chosen_blocks(self.lists(*features, own), blocks).any(2)
        if self.cubes.captions:
            wanted[:, :, blocks - self.cubes.captions :] = True
            asking = torch.tensor([share.end is None or share.first == 0 for share in own])
            wanted |= on_device(asking, wanted.device)[None, :, None]
        return wanted

    def capacity(self, division: Division, counts: Counts, shard: SequenceShard) -> Capacity:
        groups, captions = len(self.cubes.groups) - 1, len(self.cubes.order) - self.cubes.video
        held = [sum(part[holder] for part in counts) for holder in range(shard.degree)]
        extra = [self._captions_of(counts, holder) if captions else 0 for holder in range(shard.degree)]
        nodes = [rank // self.room.node for rank in shard.ranks]

        def rows(owner: int, share: HeadShare, holder: int) -> int:
            if nodes[owner] == nodes[holder]:
                return held[holder]
            return self.room.rows(share, groups, self.densities[share.head], held[holder], extra[holder])

        return tuple(
            tuple(tuple(rows(owner, share, holder) for holder in range(shard.degree)) for share in own)
            for owner, own in enumerate(division)
        )

    def note(self, overflowed: Tensor) -> None:
        self.noted.append(overflowed)

    def _captions_of(self, counts: Counts, holder: int) -> int:
        cells = cells_of_tokens(self.cubes)
        return sum(int((cells[first:end] < 0).sum()) for first, end in held_ranges(counts, holder))

    def _features(
        self, query: Tensor, key: Tensor, division: Division, counts: Counts, shard: SequenceShard
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of the cells of own heads, as queries and as keys: every holder adds its tokens of a cell."""
        heads, device = [[share.head for share in own] for own in division], query.device
        mine = _partial_features(key, self.key_projection, _held_cells(self.cubes, counts, shard.index, device))
        send = [[_of_heads(mine, numbers)] for numbers in heads]
        held = [_held_cells(self.cubes, counts, holder, device) for holder in range(shard.degree)]
        width, own = mine.shape[3], heads[shard.index]
        shapes = [[(query.shape[0], len(own), len(cells.numbers), width)] for cells in held]
        received = exchange(send, shapes, shard.ranks, shard.group)
        if not own:
            return None, None
        total = mine.new_zeros(query.shape[0], len(own), len(self.cubes.cells) - 1, width)
        for cells, (piece,) in zip(held, received, strict=True):
            total.index_add_(2, cells.numbers, piece)  # a cell is there once: the order is that of the ranks
        order = order_on(self.cubes, device)[: self.cubes.video]
        ordered = query.index_select(2, order)
        by = _of_heads(self.query_projection[None], own)[0]
        return cell_features(ordered, by.detach(), self.cubes), total


@dataclass(frozen=True, eq=False)
class HeldCells:
    """The cells of which a holder has tokens: their ``numbers``, its ``tokens`` in their order, where each cell
    ``starts`` among these, and the whole cells' ``sizes``."""

    numbers: Tensor
    tokens: Tensor
    starts: Tensor
    sizes: Tensor


@functools.lru_cache(maxsize=512)
def _held_cells(cubes: TokenCubes, counts: Counts, holder: int, device: torch.device) -> HeldCells:
    cells = torch.cat([cells_of_tokens(cubes)[first:end] for first, end in held_ranges(counts, holder)])
    order = cells.argsort(stable=True)
    order = order[cells[order] >= 0]
    numbers, sizes = torch.unique_consecutive(cells[order], return_counts=True)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    tables = (numbers, order, starts, cubes.cells.diff()[numbers].float())
    return HeldCells(*(on_device(table, device) for table in tables))


def _partial_features(key: Tensor, projection: Tensor, held: HeldCells) -> Tensor:
    """[B, H, cells held, r]: what a holder's tokens add to the projected means of their cells."""
    tokens = key.index_select(2, held.tokens).to(projection.dtype).movedim(2, 0).contiguous()
    sums = torch.segment_reduce(tokens, "sum", offsets=held.starts, axis=0, unsafe=True).movedim(0, 2)
    features: Tensor = (sums / held.sizes.to(sums.dtype)[:, None]) @ projection.detach()
    return features


def _of_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    return torch.cat([x[:, :0], *(x[:, head : head + 1] for head in heads)], 1)


@functools.lru_cache(maxsize=64)
def block_of_tokens(cubes: TokenCubes) -> Tensor:
    """[S] int64 on the host."""
    return torch.searchsorted(cubes.blocks, cubes.places, right=True) - 1


@functools.lru_cache(maxsize=64)
def cells_of_tokens(cubes: TokenCubes) -> Tensor:
    """[S] int64 on the host; -1 for captions."""
    places = cubes.places
    return torch.where(places < cubes.video, torch.searchsorted(cubes.cells, places, right=True) - 1, -1)
