"""The memory in which layers of cells are whole: a few slots that a rank's layers take in turn, each always the same.

A layer that is gathered into new memory costs an allocation each time, and on a CPU a page fault every 4 KiB. Layers
run one behind the other, ``HELD`` are whole at once, so layer n lies in slot n mod ``HELD``, and what lies in none in a
slot of its own. The stages of a rank share the slots. What autograd has kept of a parameter is a view of its slot: it
reads what lies there.

A gather writes where the layer before the last lay. On a device it is behind all that the current stream had when it
was started, as every collective and every copy from the host is: behind that layer's last kernel.

Where a layer is whole longer than its turn (it runs again, or layers run in another order than they are listed in) its
values are put aside, and come back before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from arachnec.ir.parameter_cells import HELD
from arachnec.model_state.cells.flat_layer import FlatLayout

ALIGNED = 512  # bytes: as allocators align, for copies and collectives of any precision


@dataclass(eq=False)
class _Slot:
    buffer: Tensor  # bytes, as many as the largest layer has; with memory from their first use to ``drop``
    layer: Hashable | None = None  # that is whole in it
    put_aside: Callable[[], None] | None = None  # takes that layer out

    def grow(self, size: int) -> None:
        storage = self.buffer.untyped_storage()
        if storage.size() < size:
            storage.resize_(0)  # what lies there is of nobody any more
            storage.resize_(size)


@dataclass(eq=False)
class Slots:
    """Of one rank, by number."""

    slots: dict[int, _Slot] = field(default_factory=dict)

    @classmethod
    def of(cls, stages: Iterable[tuple[Sequence[FlatLayout], int]], device: torch.device) -> Slots:
        """``stages`` are the flat tensors of each, and the number of its last layer."""
        sizes: dict[int, int] = {}
        for layouts, last in stages:
            layers: dict[int, list[FlatLayout]] = {}
            for layout in layouts:
                layers.setdefault(layout.layer, []).append(layout)
            for layer, own in layers.items():
                number = slot_of(layer, last)
                sizes[number] = max(sizes.get(number, 0), ends_of(own)[-1])
        slots = {n: _Slot(torch.empty(size, dtype=torch.uint8, device=device)) for n, size in sizes.items()}
        return cls(slots)

    def places(self, layer: int, last: int, layouts: Sequence[FlatLayout]) -> list[Tensor]:
        """The whole flat tensors of one layer, one behind the other in its slot."""
        buffer, ends = self.slots[slot_of(layer, last)].buffer, ends_of(layouts)
        return [
            buffer.data[first : first + bytes_of(layout)].view(layout.dtype)
            for layout, first in zip(layouts, [0, *ends], strict=False)
        ]

    def take(self, slot: int, layer: Hashable, layouts: Sequence[FlatLayout], put_aside: Callable[[], None]) -> None:
        """Have ``layer`` lie in its slot from now on; one that is whole there is put aside."""
        own = self.slots[slot]
        if own.put_aside is not None and own.layer != layer:
            own.put_aside()
        own.layer, own.put_aside = layer, put_aside
        own.grow(ends_of(layouts)[-1])

    def leave(self, slot: int, layer: Hashable) -> None:
        """The slot is free, if this layer lay in it."""
        own = self.slots.get(slot)
        if own is not None and own.layer == layer:
            own.layer = own.put_aside = None

    def drop(self) -> None:
        """Give the memory of all free slots back."""
        for slot in self.slots.values():
            if slot.layer is None:
                slot.buffer.untyped_storage().resize_(0)


def slot_of(layer: int, last: int) -> int:
    """The slot of a stage's layer; ``last`` is the number of what lies in none."""
    return HELD if layer == last else layer % HELD


def bytes_of(layout: FlatLayout) -> int:
    """Of a whole flat tensor."""
    return layout.shard_size * layout.ranks * layout.dtype.itemsize


def ends_of(layouts: Sequence[FlatLayout]) -> list[int]:
    """Where each of a layer's flat tensors ends in its slot and the next begins, in bytes."""
    return list(accumulate(-(-bytes_of(layout) // ALIGNED) * ALIGNED for layout in layouts))
