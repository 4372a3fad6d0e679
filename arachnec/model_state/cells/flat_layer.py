"""One flat tensor of a layer on one rank, its own shard always, the whole for a while; where parameters lie in it.

The layer's parameters are views of the whole, for good: of memory that other layers have in between (`gathering`).

A layer has one flat tensor for each precision, and apart what trains and what does not. Its parameters lie in it one
behind the other; it is cut into equal shards, the last one padded (Zhao et al., "PyTorch FSDP", arXiv 2304.11277,
section 3.2.1). A shard boundary may fall inside a parameter: a rank then has a *piece* of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.model_state.cells.host_shard import HostShard
from arachnec.model_state.kept_gradients import gradient_dtype, gradient_of, set_gradient
from arachnec.runtime.collectives import Waited, start_all_gather_in_place, start_reduce_scatter_in_place
from arachnec.runtime.host_copies import HostCopies


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


EXACT = 4  # bytes of an element, from which on a collective itself may sum


@dataclass
class FlatLayer:
    """``shard`` is this rank's; ``pieces`` are views of it by name, what the optimizer updates."""

    layout: FlatLayout
    shard: Tensor
    whole: Tensor
    parameters: Mapping[str, nn.Parameter]
    pieces: Mapping[str, nn.Parameter]
    gradient: Tensor | None = None  # of the shard, summed over the cell and the cascades so far
    used: set[str] = field(default_factory=set)  # parameters that had a gradient on this rank
    member: int = 0  # this rank's place in its cell
    host: HostShard | None = None  # where shard and gradient lie in the host's memory

    @classmethod
    def of(
        cls,
        layout: FlatLayout,
        shard: Tensor,
        whole: Tensor,
        parameters: Mapping[str, nn.Parameter],
        member: int,
        copies: HostCopies | None = None,
    ) -> FlatLayer:
        """With ``parameters`` taken over: each becomes a view of the ``whole``, and has no memory of its own.

        With ``copies`` the shard lies in the host's memory.
        """
        unversioned = whole.data  # autograd does not take a gather for a change of what it has kept
        for slot in layout.slots:
            view = unversioned[slot.first : slot.first + slot.size].view(slot.shape)
            old = parameters[slot.name]
            new = nn.Parameter(view, old.requires_grad)
            new.__dict__.update(old.__dict__)
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        pieces = {
            piece.slot.name: nn.Parameter(shard[piece.place : piece.place + piece.size], layout.trained)
            for piece in layout.pieces(member)
        }
        views = {slot.name: parameters[slot.name] for slot in layout.slots}
        host = None if copies is None else HostShard(copies)
        return cls(layout, shard, whole, views, pieces, member=member, host=host)

    @property
    def gradient_dtype(self) -> torch.dtype:
        return gradient_dtype(next(iter(self.parameters.values())))

    def make_host_gradient(self) -> None:
        """Have the host's buffer of the gradient, where it lies there."""
        if self.host is not None:
            self.host.make_gradient(self.layout.shard_size, self.gradient_dtype)

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup | None) -> Waited:
        """Start to make it whole; the work is to be waited for before a parameter is read."""
        if self.host is not None:
            return self.host.bring_layer(self.whole, self.shard, self.member, group)
        assert group is not None, "a layer on one device alone is whole there"
        return start_all_gather_in_place(self.whole, self.shard, self.member, group)

    @torch.no_grad()
    def scatter(self, group: dist.ProcessGroup | None, flat: Tensor | None = None) -> Scattering | None:
        """Start to sum the parameters' gradients over the cell, each rank its shard; None where nothing trains.

        The gradients are taken off the parameters, and put together in ``flat`` if it is given.
        """
        if not self.layout.trained:
            return None
        self.used.update(name for name, value in self.parameters.items() if gradient_of(value) is not None)
        if flat is None:
            flat = torch.empty(self.whole.numel(), dtype=self.gradient_dtype, device=self.whole.device)
        self._put_together(flat, added=group is None and self.host is not None)
        if group is None:
            self.add(flat)
            return None
        if flat.itemsize >= EXACT:
            return Scattering(self, flat, *start_reduce_scatter_in_place(flat, self.member, group))
        parts = torch.empty_like(flat)
        work = dist.all_to_all_single(parts, flat, group=group, async_op=True)
        assert work is not None
        return Scattering(self, flat, parts, work)

    def _put_together(self, flat: Tensor, *, added: bool) -> None:
        """The gradients of all parameters, zero where there is none; ``added`` to those that the host has so far."""
        if added:
            assert self.host is not None
            flat.zero_()
            self.host.bring_gradient(flat, self.gradient)
        end = 0
        for slot in self.layout.slots:
            value, end = self.parameters[slot.name], slot.first + slot.size
            part, gradient = flat[slot.first : end], gradient_of(value)
            if gradient is None:
                if not added:
                    part.zero_()
                continue
            if added:
                part.add_(gradient.reshape(-1))
            else:
                part.copy_(gradient.reshape(-1))
            set_gradient(value, None)
        if not added:
            flat[end:].zero_()

    def add(self, reduced: Tensor) -> None:
        """A cascade's gradient of the shard, a view for the moment; from a rank alone, with those of the cascades
        before."""
        if self.host is not None:
            if self.layout.ranks > 1 and self.gradient is not None:
                before = torch.empty_like(reduced)
                self.host.bring_gradient(before, self.gradient)
                reduced = reduced.add_(before)
            self.gradient = self.host.take_gradient(reduced)
            return
        self.gradient = reduced.clone() if self.gradient is None else self.gradient.add_(reduced)


@dataclass(frozen=True)
class Scattering:
    """Gradients on their way to the ranks that keep them. Those of low precision are added up there, in fp32."""

    flat_layer: FlatLayer
    flat: Tensor  # kept until it has been sent
    arriving: Tensor
    work: dist.Work

    @torch.no_grad()
    def finish(self) -> None:
        self.work.wait()
        reduced = self.arriving
        if reduced.numel() == self.flat.numel() and self.flat_layer.layout.ranks > 1:
            parts = reduced.view(self.flat_layer.layout.ranks, -1)
            reduced = parts.sum(0, dtype=torch.float32).to(self.flat.dtype)
        self.flat_layer.add(reduced)
