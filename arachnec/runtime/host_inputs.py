"""Inputs of blocks that run again in the backward, in the host's memory meanwhile.

They go out behind the block that reads them. When the backward comes to a block its inputs are there: those of the
block before start their way back at that moment, while this one computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.runtime.device_runtime import Event
from arachnec.runtime.host_copies import Arrival, HostCopies


@dataclass(eq=False)
class _Kept:
    """One input: in the host, on its way back, or back."""

    buffer: Tensor
    gone: Event
    before: _Kept | None  # the one that goes out before; needed after it, or before it by the same block
    here: tuple[Tensor, Arrival] | None = None
    read: bool = False  # its buffer may hold another one by now


@dataclass
class HostInputs:
    """Of one rank; ``put`` and ``get`` are what autograd calls when it saves an input, and when it needs it again."""

    copies: HostCopies
    _last: _Kept | None = field(default=None, repr=False)

    @torch.no_grad()
    def put(self, value: Tensor) -> object:
        """Take an input out of the device's memory."""
        buffer, free = self.copies.lend(value.shape, value.dtype)
        self._last = _Kept(buffer, self.copies.take(buffer, value, free), self._last)
        return self._last

    @torch.no_grad()
    def get(self, kept: object) -> Tensor:
        """Have it back on the device, once, and the one before it on its way."""
        assert isinstance(kept, _Kept) and not kept.read
        self._start(kept)
        if kept.before is not None:
            self._start(kept.before)
        assert kept.here is not None
        value, arrival = kept.here
        arrival.wait()
        kept.here = None
        kept.before = None
        kept.read = True
        return value

    def begin(self) -> None:
        """A cascade's forward begins: what others have kept is none of its."""
        self._last = None

    def _start(self, kept: _Kept) -> None:
        if kept.here is not None or kept.read:
            return
        device = self.copies.runtime.device
        value = torch.empty(kept.buffer.shape, dtype=kept.buffer.dtype, device=device)
        arrival = self.copies.bring(value, kept.buffer, kept.gone)
        self.copies.give_back(kept.buffer, arrival.event)
        kept.here = value, arrival
