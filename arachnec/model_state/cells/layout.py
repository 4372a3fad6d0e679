"""Where each parameter of a layer lies in the flat tensors that a cell deals out. In: shapes. Out: places.

A layer has one flat tensor for each precision, and apart what trains and what does not. Its parameters lie in it one
behind the other; it is cut into equal shards, the last one padded (Zhao et al., "PyTorch FSDP", arXiv 2304.11277,
section 3.2.1). A shard boundary may fall inside a parameter: a rank then has a *piece* of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat tensor."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + size) of a flattened parameter, which lie in a rank's shard from ``place`` on."""

    slot: Slot
    start: int
    size: int
    place: int


@dataclass(frozen=True)
class FlatLayout:
    """One flat tensor of a layer."""

    layer: int
    dtype: torch.dtype
    trained: bool
    slots: tuple[Slot, ...]
    ranks: int  # of a cell

    @property
    def shard_size(self) -> int:
        """Elements of one rank's shard."""
        end = self.slots[-1].first + self.slots[-1].size
        return -(-end // self.ranks)

    def pieces(self, member: int) -> Iterator[Piece]:
        """What a cell's member number ``member`` has of each parameter; nothing of most."""
        begin, end = member * self.shard_size, (member + 1) * self.shard_size
        for slot in self.slots:
            first, last = max(begin, slot.first), min(end, slot.first + slot.size)
            if first < last:
                yield Piece(slot, first - slot.first, last - first, first - begin)


def layouts_of(parameters: Mapping[str, Tensor], layers: Mapping[str, int], ranks: int) -> tuple[FlatLayout, ...]:
    """The flat tensors of a model in the order of its layers; ``layers`` says which layer each parameter is in."""
    groups: dict[tuple[int, str, bool], list[str]] = {}
    for name, value in parameters.items():
        groups.setdefault((layers[name], str(value.dtype), value.requires_grad), []).append(name)
    return tuple(
        _layout(layer, trained, {name: parameters[name] for name in names}, ranks)
        for (layer, _, trained), names in sorted(groups.items())
    )


def _layout(layer: int, trained: bool, parameters: Mapping[str, Tensor], ranks: int) -> FlatLayout:
    slots: list[Slot] = []
    end = 0
    for name, value in parameters.items():
        slots.append(Slot(name, tuple(value.shape), end))
        end += value.numel()
    dtype = next(iter(parameters.values())).dtype
    return FlatLayout(layer, dtype, trained, tuple(slots), ranks)
