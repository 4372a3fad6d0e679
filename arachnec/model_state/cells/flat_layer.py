"""One flat tensor of a layer on one rank: its own shard always, the whole from gather to release.

The layer's parameters are views of the whole, for good. Releasing takes the memory from under them, gathering gives it
back at the same place, so that what autograd has kept of a parameter reads the gathered values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.model_state.cells.host_shard import HostShard, Waited
from arachnec.model_state.cells.layout import FlatLayout
from arachnec.model_state.kept_gradients import gradient_dtype, gradient_of, set_gradient
from arachnec.runtime.collectives import start_reduce_scatter_in_place
from arachnec.runtime.host_copies import HostCopies

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
        parameters: Mapping[str, nn.Parameter],
        member: int,
        copies: HostCopies | None = None,
    ) -> FlatLayer:
        """With ``parameters`` taken over: each becomes a view of the whole, and has no memory of its own.

        With ``copies`` the shard lies in the host's memory.
        """
        device = shard.device if copies is None else copies.runtime.device
        whole = shard.new_empty(layout.shard_size * layout.ranks, device=device)
        unversioned = whole.data  # autograd does not take a gather for a change of what it has kept
        for slot in layout.slots:
            view = unversioned[slot.first : slot.first + slot.size].view(slot.shape)
            old = parameters[slot.name]
            new = nn.Parameter(view, old.requires_grad)
            new.__dict__.update(old.__dict__)
            torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
        whole.untyped_storage().resize_(0)
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

    @torch.no_grad()
    def gather(self, group: dist.ProcessGroup | None) -> Waited:
        """Start to make it whole; the work is to be waited for before a parameter is read."""
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.itemsize)
        if self.host is not None:
            return self.host.bring_layer(self.whole, self.shard, group)
        assert group is not None, "a layer on one device alone is whole there"
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: dist.Work | None = gather(self.whole, self.shard, group=group, async_op=True)
        assert work is not None
        return work

    def release(self) -> None:
        self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def scatter(self, group: dist.ProcessGroup | None) -> Scattering | None:
        """Start to sum the parameters' gradients over the cell, each rank its shard; None where nothing trains.

        The gradients are taken off the parameters.
        """
        if not self.layout.trained:
            return None
        values = list(self.parameters.values())
        self.used.update(name for name, value in self.parameters.items() if gradient_of(value) is not None)
        flat = torch.zeros(self.whole.numel(), dtype=self.gradient_dtype, device=self.whole.device)
        if group is None and self.host is not None:
            self.host.bring_gradient(flat, self.gradient)
        for slot, value in zip(self.layout.slots, values, strict=True):
            if (gradient := gradient_of(value)) is not None:
                flat[slot.first : slot.first + slot.size].add_(gradient.reshape(-1))
                set_gradient(value, None)
        if group is None:
            self.add(flat)
            return None
        if flat.itemsize >= EXACT:
            return Scattering(self, flat, *start_reduce_scatter_in_place(flat, self.member, group))
        parts = torch.empty_like(flat)
        work = dist.all_to_all_single(parts, flat, group=group, async_op=True)
        assert work is not None
        return Scattering(self, flat, parts, work)

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
