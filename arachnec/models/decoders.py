"""Decoders of a sampler file: latents to pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import user_error
from arachnec.models.file import called, own_errors
from arachnec.models.latents import decode
from arachnec.models.sampler_file import SamplerFile, request_of

DECODER = "decoder"  # the name of a sampler file's decoder as a stage


class VideoDecoder(nn.Module):
    """The decoder of a Diffusers video VAE; the other way of ``VideoEncoder``.

    ``frames_first``: latents are ``[B, frames, channels, height, width]``, as CogVideoX has them.
    ``factor`` is the encoder's.
    """

    def __init__(self, vae: nn.Module, *, frames_first: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.vae = vae.requires_grad_(False).eval()
        self.frames_first = frames_first

    @torch.no_grad()
    def forward(self, latents: Tensor) -> Tensor:
        """Pixels ``[B, 3, frames, height, width]`` on [-1, 1], not clamped."""
        latents = latents.transpose(1, 2) if self.frames_first else latents
        return decode(self.vae, latents.to(next(self.vae.parameters()).dtype) / self.factor)


class FromLatents(nn.Module):
    """A decoder in an encoder's form, to be traced and timed: what it loads has the shape of a clip's latents."""

    def __init__(self, sampler: SamplerFile, decoder: nn.Module, latents: Callable[[VideoClip], Tensor]) -> None:
        super().__init__()
        self.sampler = sampler
        self.decoder = decoder
        self.latents = latents

    def load(self, clip: VideoClip, device: torch.device | str) -> Tensor:
        """Zeros ``[1, ...]``."""
        return torch.zeros_like(self.latents(clip), device=device)

    def forward(self, loaded: Tensor) -> Tensor:
        return decoded(self.sampler, self.decoder, loaded)


def decoded(sampler: SamplerFile, decoder: nn.Module, latents: Tensor) -> Tensor:
    """Pixels ``[1, 3, frames, height, width]`` of a sampler file's decoder.

    Raises ``UserError`` where it gives something else, or raises in the file's own code.
    """
    with own_errors(sampler.path, "the decoder's forward", "sampler file"):
        pixels = decoder(latents)
    if not isinstance(pixels, Tensor) or pixels.ndim != 5 or pixels.shape[:2] != (1, 3) or 0 in pixels.shape:
        got = str(list(pixels.shape)) if isinstance(pixels, Tensor) else called(pixels)
        raise user_error(
            f"the decoder gives {got} for latents {list(latents.shape)}",
            label="must return a module that gives pixels",
            help="give a floating-point tensor [1, 3, frames, height, width] on [-1, 1]",
            span=sampler.span("decoder"),
        )
    return pixels


def latents_of(sampler: SamplerFile, clips: Sequence[VideoClip]) -> Callable[[VideoClip], Tensor]:
    """The latents of a clip's shape, on the meta device."""
    generator = torch.Generator("cpu").manual_seed(0)
    known = {c.shape: sampler.noise(request_of(c), generator).to("meta") for c in {c.shape: c for c in clips}.values()}
    return lambda clip: known[clip.shape]
