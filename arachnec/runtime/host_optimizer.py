"""Masters of an optimizer that lies in the host's memory beside parameters on the device: gradients out, values in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.runtime.host_copies import Arrival, HostCopies


@dataclass
class HostMasters:
    """``taken`` and ``rounded`` are buffers in the host, of gradients and of parameters, made at their first use."""

    copies: HostCopies
    _taken: dict[str, Tensor] = field(default_factory=dict)
    _rounded: dict[str, Tensor] = field(default_factory=dict)
    _arrivals: list[Arrival] = field(default_factory=list)

    def master(self, parameter: Tensor) -> Tensor:
        """A copy in the host of at least fp32, as a parameter of the optimizer."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        copy = torch.empty(parameter.shape, dtype=dtype, device="cpu")
        return torch.nn.Parameter(copy.copy_(parameter.detach()))

    @torch.no_grad()
    def gradients(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gradients in the host; the host waits for them."""
        for name, value in given.items():
            if name not in self._taken:
                self._taken[name] = self.copies.buffer(value.numel(), value.dtype)
            event = self.copies.take(self._taken[name].view(value.shape), value)
        self.copies.settle()
        if given:
            event.synchronize()
        return {name: self._taken[name].view(value.shape) for name, value in given.items()}

    @torch.no_grad()
    def bring(self, name: str, target: Tensor, master: Tensor) -> None:
        """Start to fill a tensor on the device from its master, rounded in the host; the current stream waits."""
        if name not in self._rounded:
            self._rounded[name] = self.copies.buffer(target.numel(), target.dtype)
        rounded = self._rounded[name].view(target.shape)
        rounded.copy_(master)
        self.copies.bring(target, rounded).wait()
