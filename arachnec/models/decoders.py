"""Decoders of a sampler file: latents to pixels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class VideoDecoder(nn.Module):
    """The decoder of a Diffusers video VAE; the other way of ``VideoEncoder``.

    ``frames_first``: latents are ``[B, frames, channels, height, width]``, as CogVideoX has them.
    """

    def __init__(self, vae: nn.Module, *, frames_first: bool = False) -> None:
        super().__init__()
        self.vae = vae.requires_grad_(False).eval()
        self.frames_first = frames_first

    @torch.no_grad()
    def forward(self, latents: Tensor) -> Tensor:
        """Pixels ``[B, 3, frames, height, width]`` on [-1, 1], not clamped."""
        vae: Any = self.vae
        latents = latents.transpose(1, 2) if self.frames_first else latents
        latents = latents.to(next(vae.parameters()).dtype)
        config = vae.config
        if getattr(config, "latents_mean", None) is not None and getattr(config, "latents_std", None) is not None:
            mean, std = (latents.new_tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
            latents = latents * std + mean
        else:
            latents = latents / getattr(config, "scaling_factor", 1.0) + (getattr(config, "shift_factor", None) or 0.0)
        pixels: Tensor = vae.decode(latents).sample
        return pixels
