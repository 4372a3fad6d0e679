"""What encoders give for a request, as bytes that travel: of its caption, and with guidance of its negative prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from arachnec.backends.cascade_step import encode
from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request
from arachnec.models.sampler_file import SamplerFile
from arachnec.tracing.sample import encoded_shape


@dataclass
class Encoders:
    """The encoders of a sampler file on one rank. Those that it runs are built when they are first needed."""

    sampler: SamplerFile
    models: tuple[str, ...]
    device: torch.device
    _built: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def on_meta(self) -> Mapping[str, nn.Module]:
        if self.sampler.encoders is None:
            return {}
        with torch.device("meta"):
            return self.sampler.encoders()

    def build(self, names: Collection[str]) -> None:
        """Those that this rank runs, before it needs them."""
        for name in names:
            self._encoder(name)

    def size(self, name: str, requests: Sequence[Request]) -> int:
        """Bytes of the value of these requests."""
        return sum(shape.nbytes for request in requests for shape in self._shapes(name, request))

    def encode(self, name: str, requests: Sequence[Request]) -> Tensor:
        """uint8 ``[size]`` on the device."""
        encoder = self._encoder(name)
        rows = [encode(encoder, [clip], self.device) for request in requests for clip in self._clips(request)]
        return torch.cat([row.contiguous().reshape(-1).view(torch.uint8) for row in rows])

    def encoded(self, values: Mapping[str, tuple[Sequence[Request], Tensor]], request: Request) -> Request:
        """The request with what every encoder gives. ``values`` are those that came from elsewhere, by encoder."""
        named: list[dict[str, Tensor]] = [{}, {}]
        for name in self.on_meta:
            requests, value = values.get(name) or ((request,), self.encode(name, [request]).cpu())
            own = next(rows for other, rows in self._rows(name, requests, value) if other.id == request.id)
            for branch, row in zip(named, own, strict=False):
                branch[name] = row.to(self.device, non_blocking=True)
        return replace(request, encoded=named[0], negative_encoded=named[1])

    def with_noise(self, request: Request) -> Request:
        """The request with noise of the shapes of what every encoder would give. None of them runs with values."""
        named: list[dict[str, Tensor]] = [{}, {}]
        generator = torch.Generator("cpu").manual_seed(0)
        for name in self.on_meta:
            for branch, shape in zip(named, self._shapes(name, request), strict=False):
                branch[name] = torch.randn(shape.shape, generator=generator).to(shape.dtype)
        return replace(request, encoded=named[0], negative_encoded=named[1])

    def _rows(self, name: str, requests: Sequence[Request], value: Tensor) -> Iterator[tuple[Request, list[Tensor]]]:
        offset = 0
        for request in requests:
            rows = []
            for shape in self._shapes(name, request):
                part = value[offset : offset + shape.nbytes].clone()
                rows.append(part.view(shape.dtype).reshape(shape.shape))
                offset += shape.nbytes
            yield request, rows

    def _shapes(self, name: str, request: Request) -> list[Tensor]:
        return [encoded_shape(self.on_meta[name], clip) for clip in self._clips(request)]

    def _clips(self, request: Request) -> list[VideoClip]:
        guided = any(self.sampler.branches(name, request) > 1 for name in self.models)
        return [request.clip(), request.clip(conditional=False)] if guided else [request.clip()]

    def _encoder(self, name: str) -> nn.Module:
        if name not in self._built:
            assert self.sampler.encoders is not None
            torch.manual_seed(0)
            make: Callable[[], dict[str, nn.Module]] = self.sampler.encoders
            self._built[name] = make()[name].to(self.device).eval().requires_grad_(False)
        return self._built[name]
