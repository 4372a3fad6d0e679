"""Layers that come and go while a cascade runs on a cell, and the few slots of memory in which they are whole.

In a forward each layer is gathered before it runs, one ahead, and released behind it. In a backward it is gathered
again before its first gradient is computed, for recomputation as well; once the backward has come to the layer before
it, its gradients are reduce-scattered and it is released.

All members of a cell gather in the order of the program's list, whatever the model does: a layer that runs early brings
those before it along, one that never runs is gathered at the end. A backward takes the order in which layers ran.

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

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.analysis.gathers import layers_listed
from arachnec.ir.nodes import Instruction, integer
from arachnec.ir.parameter_cells import HELD
from arachnec.model_state.cells.flat_layer import FlatLayer, FlatLayout, Scattering
from arachnec.runtime.collectives import Waited
from arachnec.spmd.sharded_tokens import ShardedTokens

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


@dataclass
class _Pass:
    """A forward or backward that is going on."""

    gather: deque[int]
    release: frozenset[int]
    scatter: frozenset[int]
    held: int
    left: Counter[int]  # calls of each layer that are still to come in a backward
    ran: Counter[int] = field(default_factory=Counter)  # calls of each layer in a forward
    begun: list[int] = field(default_factory=list)  # layers whose backward has begun and not ended
    running: int | None = None  # the layer that was asked for last
    gradients: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)  # where they are put together


@dataclass
class Gathering:
    """``layers`` are the flat tensors of every layer by number, ``modules`` the layers that are modules.

    ``group`` is the cell, for these collectives alone. At most one layer's gradients are on their way at once.
    """

    layers: Mapping[int, Sequence[FlatLayer]]
    modules: Mapping[int, nn.Module]
    group: dist.ProcessGroup | None  # None: a rank alone, whose layers come from its host
    slots: Slots
    updated: Callable[[int], None] | None = None  # waits until a layer's shard is that of all who updated parts of it
    _whole: dict[int, list[Waited]] = field(default_factory=dict)  # with what is still to be waited for
    _aside: dict[int, list[Tensor]] = field(default_factory=dict)  # whole layers in whose slot another one lies
    _scattering: list[Scattering] = field(default_factory=list)
    _pass: _Pass | None = None
    _calls: dict[str, Counter[int]] = field(default_factory=dict)  # of each layer, by the forward's cascade
    _tell: Callable[[int], None] | None = None  # of a layer whose gradients are summed over the cell

    def __post_init__(self) -> None:
        for number, module in self.modules.items():
            module.register_forward_pre_hook(lambda _, __, number=number: self._enter(number))
            module.register_forward_hook(lambda _, __, output, number=number: self._leave(number, output))

    @contextmanager
    def forward(self, instruction: Instruction) -> Iterator[None]:
        """Run a cascade's forward inside."""
        self._pass = going = _pass(instruction, layers_listed(instruction, "gather"), Counter())
        self._first(going)
        try:
            yield
            self._rest(going)
            self._calls[instruction.target] = going.ran
        finally:
            self._pass = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Run a forward without gradients inside that no program has. All members of the cell do; one that does not run
        the model has its part in gathering all the same."""
        numbers = sorted(self.layers, key=lambda number: (number in self.modules, number))
        self._pass = going = _Pass(deque(numbers), frozenset(numbers), frozenset(), HELD, Counter())
        self._first(going)
        try:
            yield
            self._rest(going)
        finally:
            self._pass = None
            self.slots.drop()

    @contextmanager
    def backward(self, instruction: Instruction, forward: str) -> Iterator[None]:
        """Run the backward of the cascade ``forward`` inside."""
        left = self._calls.pop(forward)
        self._pass = going = _pass(instruction, layers_listed(instruction, "gather")[::-1], left)
        self._first(going)
        try:
            yield
            for number in [*going.begun]:
                self._end(going, number)
            self._rest(going)
            for number in sorted(going.scatter, reverse=True):
                self._scatter(going, number)
            self._wait_for_scattering()
            self._rest(going)
        finally:
            self._pass = None

    def weight(self, instruction: Instruction, run: Callable[[int], None]) -> None:
        """Reduce-scatter the gradients that a split backward left: each layer's once ``run(layer)`` has made them."""
        going = _pass(instruction, (), Counter())
        for number in reversed(layers_listed(instruction, "scatter")):
            run(number)
            self._scatter(going, number)
        self._wait_for_scattering()

    @contextmanager
    def telling(self, tell: Callable[[int], None]) -> Iterator[None]:
        """Inside, ``tell`` hears of every layer whose gradients have been summed over the cell."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def _enter(self, number: int) -> None:
        """A layer is about to run."""
        if self._pass is not None:
            self._pass.ran[number] += 1
            self._bring(self._pass, number)

    def _leave(self, number: int, output: Any) -> None:
        """A layer has run; its gradients come later."""
        if self._pass is None:
            return
        if torch.is_grad_enabled():
            call = _Call(self, number)
            for tensor in pytree.tree_leaves(output):
                local = tensor.local if isinstance(tensor, ShardedTokens) else tensor
                if isinstance(local, Tensor) and local.requires_grad:
                    local.register_hook(call)  # type: ignore[no-untyped-call]
        self._release(self._pass, number)

    def come_to(self, number: int) -> None:
        """A backward comes to a layer: those that it came to before are through, unless they ran more than once."""
        going = self._pass
        assert going is not None, "gradients are computed inside `backward`"
        going.left[number] -= 1
        for other in [other for other in going.begun if other != number and going.left[other] <= 0]:
            self._end(going, other)
        if number not in going.begun:
            going.begun.append(number)
        self._bring(going, number)

    def _end(self, going: _Pass, number: int) -> None:
        going.begun.remove(number)
        self._scatter(going, number)
        self._release(going, number)

    def _first(self, going: _Pass) -> None:
        """Have the first layer on its way, and here what lies in none that runs."""
        outside = [number for number in going.gather if number not in self.modules]
        for number in outside:
            self._bring(going, number)
        released = [number for number in self.layers if number not in self.modules and number not in self._whole]
        if released:  # its slot has what another layer left there, or by chance the right values
            raise RuntimeError(f"layer {released[0]} is read and is not whole")
        self._ahead(going)

    def _rest(self, going: _Pass) -> None:
        """Gather what nothing has asked for, as the other members may have, and release all that is to go."""
        while going.gather:
            number = going.gather[0]
            self._bring(going, number)
            self._release(going, number)
        for number in [number for number in self._whole if number in going.release]:
            self._release(going, number)

    def _bring(self, going: _Pass, number: int) -> None:
        """Make a layer whole, and those before it in the list; have the next one on its way."""
        while number not in self._whole and going.gather:
            self._start(going.gather.popleft())
        if number not in self._whole:  # it runs again
            self._start(number)
        self._take_back(number)
        going.running = number
        self._ahead(going)
        self._wait(number)

    def _wait(self, number: int) -> None:
        for work in self._whole[number]:
            work.wait()
        self._whole[number] = []

    def _ahead(self, going: _Pass) -> None:
        held = sum(number in self.modules for number in self._whole)
        if not going.gather or held >= going.held:
            return
        if going.running is not None and self._slot(going.gather[0]) == self._slot(going.running):
            return  # layers do not run in the order of the list
        self._start(going.gather.popleft())

    def _start(self, number: int) -> None:
        if self.updated is not None:
            self.updated(number)
        self._take(number)
        self._whole[number] = [flat.gather(self.group) for flat in self.layers.get(number, ())]

    def _release(self, going: _Pass, number: int) -> None:
        if number not in going.release or number not in self._whole:
            return
        self._wait(number)
        del self._whole[number]
        self._aside.pop(number, None)
        self.slots.leave(self._slot(number), (id(self), number))
        if going.running == number:
            going.running = None

    def _slot(self, number: int) -> int:
        return slot_of(number, len(self.modules))

    def _take(self, number: int) -> None:
        """Have a layer lie in its slot."""
        flats = self.layers.get(number, ())
        if flats:
            self.slots.take(
                self._slot(number),
                (id(self), number),
                [flat.layout for flat in flats],
                lambda: self._put_aside(number),
            )

    @torch.no_grad()
    def _put_aside(self, number: int) -> None:
        """Another layer comes into the slot of one that is whole."""
        self._wait(number)
        self._aside[number] = [flat.whole.clone() for flat in self.layers[number]]

    @torch.no_grad()
    def _take_back(self, number: int) -> None:
        aside = self._aside.pop(number, None)
        if aside is None:
            return
        self._take(number)
        for flat, values in zip(self.layers[number], aside, strict=True):
            flat.whole.copy_(values)

    def _scatter(self, going: _Pass, number: int) -> None:
        if number not in going.scatter:
            return
        going.scatter -= {number}
        self._wait_for_scattering()
        flats = enumerate(self.layers.get(number, ()))
        started = (flat.scatter(self.group, self._put_together_in(going, place, flat)) for place, flat in flats)
        self._scattering = [scattering for scattering in started if scattering is not None]

    def _put_together_in(self, going: _Pass, place: int, flat: FlatLayer) -> Tensor | None:
        """Memory for a layer's gradients, which those before it have left; None where the host may still read it."""
        if flat.host is not None or not flat.layout.trained:
            return None
        key, size = (place, flat.gradient_dtype), flat.whole.numel()
        if key not in going.gradients or going.gradients[key].numel() < size:
            going.gradients[key] = torch.empty(size, dtype=flat.gradient_dtype, device=flat.whole.device)
        return going.gradients[key][:size]

    def _wait_for_scattering(self) -> None:
        done, self._scattering = self._scattering, []
        for scattering in done:
            scattering.finish()
        for number in dict.fromkeys(scattering.flat_layer.layout.layer for scattering in done):
            if self._tell is not None:
                self._tell(number)


class _Call:
    """One call of a layer: the first gradient of an output that comes says that its backward begins."""

    def __init__(self, gathering: Gathering, number: int) -> None:
        self._gathering, self._number, self._come = gathering, number, False

    def __call__(self, gradient: Tensor) -> None:
        if not self._come:
            self._come = True
            self._gathering.come_to(self._number)


def _pass(instruction: Instruction, gather: Sequence[int], left: Counter[int]) -> _Pass:
    return _Pass(
        deque(gather),
        frozenset(layers_listed(instruction, "release")),
        frozenset(layers_listed(instruction, "scatter")),
        integer(instruction.attrs.get("held", HELD)),
        left,
    )
