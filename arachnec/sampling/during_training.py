"""Latents of the model that is being trained. In: the options' sampler file and requests. Out: files of every request.

Whoever can run the whole model, a rank or a chain of ranks with its stages, takes every so many-th request, from noise
to files. Where a forward needs other ranks, the caller sees to it that these take part. Nothing of it stays in
training: what a forward draws and remembers is put back by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.checkpoint.files import save_tensors
from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request, read_requests
from arachnec.data.video_file import write_video
from arachnec.executable.training_options import SampledRequests, bad_value
from arachnec.ir.diagnostic import UserError
from arachnec.models.sampler_file import SamplerFile, decoded, load_sampler_file
from arachnec.sampling.forward import all_branches, branches_of
from arachnec.sampling.loop import Loop, Sampling, begin, run

Around = AbstractContextManager[None]


def sampler_and_requests(options: SampledRequests) -> tuple[SamplerFile, Sequence[Request]] | None:
    """What is sampled beside training; None where nothing is asked for. Raises ``UserError`` for a sampler file or
    requests that cannot be."""
    if options.file is None or options.requests is None:
        return None
    requests = read_requests(Path(options.requests))
    sampler = load_sampler_file(options.file)
    names = sampler.names()
    if len(names) > 1:
        reason = f"it has the models {', '.join(names)}, and one is trained"
        raise UserError(bad_value("sampling.file", options.file, reason, "name one model in the sampler file"))
    return sampler, requests


@dataclass(frozen=True)
class TrainingSamples:
    """Requests to sample behind every so many optimizer steps. A rank's ``own`` carry what the encoders gave.

    Of ranks that sample the same requests together one ``writes`` the files.
    """

    every: int
    sampling: Sampling
    count: int  # of all ranks' requests
    own: tuple[Request, ...]
    digest: str  # SHA-256 of the sampler file and the requests
    decoder: nn.Module | None
    writes: bool = True

    @classmethod
    def of(
        cls, options: SampledRequests, device: torch.device, part: int | None, parts: int, *, writes: bool = True
    ) -> TrainingSamples | None:
        """None where nothing is asked for. ``part`` of ``parts`` has every so many-th request; None has no request.

        A rank with requests builds the sampler file's encoders and decoder, and drops the encoders again. Raises
        ``UserError``.
        """
        read = sampler_and_requests(options)
        if read is None:
            return None
        sampler, requests = read
        names = sampler.names()
        own, decoder = () if part is None else tuple(requests[part::parts]), None
        if own:
            torch.manual_seed(0)
            encoders = {} if sampler.encoders is None else sampler.encoders()
            encoders = {name: _frozen(encoder, device) for name, encoder in encoders.items()}
            own = tuple(_encoded(sampler, names[0], encoders, request, device) for request in own)
            decoder = None if sampler.decoder is None or not writes else _frozen(sampler.decoder(), device)
        digest = hashlib.sha256(f"{sampler.digest} {requests!r}".encode()).hexdigest()
        return cls(options.every, Sampling(sampler, names), len(requests), own, digest, decoder, writes)

    def due(self, steps: int) -> bool:
        """Whether they are asked for behind so many optimizer steps."""
        return steps % self.every == 0

    @property
    def forwards(self) -> int:
        """How often ``write`` runs the model at most."""
        sampler, (name, *_) = self.sampling.sampler, self.sampling.names
        return sum(len(self.sampling.schedule(one)) * sampler.branches(name, one) for one in self.own)

    def write(
        self,
        model: nn.Module,
        folder: Path,
        device: torch.device,
        around: Callable[[], Around] = nullcontext,
        instead: Callable[..., Any] | None = None,
    ) -> list[str]:
        """Sample and write this rank's requests; the names of those whose latents are no numbers, which have no files.

        Every forward is taken inside ``around()``: the model's, or the one ``instead`` of it. ``folder`` is there
        afterwards, on every rank.
        """
        cast = in_precision_of(model)

        def forward(**arguments: Any) -> Any:
            with around():
                return (instead or model)(**cast(arguments))

        folder.mkdir(parents=True, exist_ok=True)
        predict = all_branches(self.sampling.sampler, branches_of(self.sampling.sampler, lambda _: forward, 1))
        failed = []
        with torch.no_grad(), _as_it_generates(model):
            for request in self.own:
                loop = begin(self.sampling, request, device)
                run([loop], predict)
                if not self.writes:
                    continue
                if loop.failed:
                    failed.append(str(request.id))
                else:
                    self._deliver(loop, folder)
        return failed

    def _deliver(self, loop: Loop, folder: Path) -> None:
        latents = folder / f"{loop.request.id}.safetensors"
        if self.decoder is not None:
            pixels = decoded(self.sampling.sampler, self.decoder, loop.latents)
            write_video(latents.with_suffix(".mp4"), pixels[0])
        save_tensors({"latents": loop.latents.cpu().contiguous()}, latents, {})


def _frozen(module: nn.Module, device: torch.device) -> nn.Module:
    return module.to(device).eval().requires_grad_(False)


@torch.no_grad()
def _encoded(
    sampler: SamplerFile, name: str, encoders: dict[str, nn.Module], request: Request, device: torch.device
) -> Request:
    """The request with what every encoder gives for its caption, and with guidance for its negative prompt."""

    def of(clip: VideoClip) -> dict[str, Tensor]:
        values = {}
        for encoder_name, encoder in encoders.items():
            load: Callable[[VideoClip, torch.device], Tensor] = encoder.load  # type: ignore[assignment]
            values[encoder_name] = encoder(load(clip, device))
        return values

    guided = sampler.branches(name, request) > 1
    return replace(
        request, encoded=of(request.clip()), negative_encoded=of(request.clip(conditional=False)) if guided else {}
    )


def in_precision_of(model: nn.Module) -> Callable[[Any], Any]:
    """What casts arguments to a model's own precision, as in training: real numbers in two dims or more."""
    dtype = next((value.dtype for value in model.parameters() if value.dtype != torch.float32), None)

    def one(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() and value.ndim >= 2 else value

    def cast(arguments: Any) -> Any:
        return arguments if dtype is None else pytree.tree_map_only(Tensor, one, arguments)

    return cast


@contextmanager
def _as_it_generates(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training
