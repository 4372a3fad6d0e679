"""A layer's shard and its gradient in the host's memory: how they come to the device, and how a gradient goes back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.runtime.collectives import Waited, start_all_gather_in_place
from arachnec.runtime.device_runtime import Event
from arachnec.runtime.host_copies import HostCopies


@dataclass
class HostShard:
    """The copies of one flat tensor. Its gradient has a buffer of its own."""

    copies: HostCopies
    _gradient: Tensor | None = None
    _taken: Event | None = None  # once it has passed, the gradient is in the host

    def bring_layer(self, whole: Tensor, shard: Tensor, member: int, group: dist.ProcessGroup | None) -> Waited:
        """Start to make a layer whole from its shard, with those of the other members where there are some."""
        if group is None:
            return self.copies.bring(whole, shard)
        own = torch.empty_like(shard, device=whole.device)
        arrival = self.copies.bring(own, shard)
        with self.copies.runtime.copying():  # the gather waits for the copy, and not what computes meanwhile
            arrival.wait()
            return _Gathered(start_all_gather_in_place(whole, own, member, group), own)

    def bring_gradient(self, target: Tensor, gradient: Tensor | None) -> None:
        """Fill ``target`` with the gradient so far, if there is one; the current stream waits for it."""
        if gradient is not None:
            self.copies.bring(target, gradient, self._taken).wait()

    def take_gradient(self, reduced: Tensor) -> Tensor:
        """Start to take a gradient to the host; the tensor that it will be in."""
        gradient = self.make_gradient(reduced.numel(), reduced.dtype)
        self._taken = self.copies.take(gradient, reduced, self._taken)
        return gradient

    def make_gradient(self, size: int, dtype: torch.dtype) -> Tensor:
        """The buffer of the gradient. It is made before the steps: to lock it waits for the device."""
        if self._gradient is None or self._gradient.dtype != dtype:
            self._gradient = self.copies.buffer(size, dtype)
        return self._gradient

    def arrive(self) -> None:
        """Wait until the gradient is in the host."""
        if self._taken is not None:
            self._taken.synchronize()


@dataclass(frozen=True)
class _Gathered:
    work: Waited
    shard: Tensor  # until it was sent

    def wait(self) -> object:
        return self.work.wait()
