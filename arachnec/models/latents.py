"""What lies between a VAE and the transformer: the scale of latents, as the VAE's own Diffusers pipelines have it.

In: a VAE and pixels or latents. Out: latents as the transformer takes them, or pixels. Every pipeline's way is
``(latents - mean) / std * factor``; VAEs differ in where these numbers lie.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError, user_error

STATS = ("latents_mean", "latents_std")


def unknown_scale_error(vae: str, reason: str) -> UserError:
    return user_error(
        f"how latents of {vae} are scaled is not known here: {reason}",
        help=(
            "write an encoder of your own: a module with load(clip, device) and forward(loaded), which "
            "scales latents as the model's pipeline does: docs/your_model.md"
        ),
    )


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """Latents ``[B, channels, frames, height, width]`` as the transformer takes them: the posterior's mode, scaled.

    A VAE of images encodes frame by frame. Raises ``UserError`` for a VAE that is unlike all of Diffusers'.
    """
    frames = pixels.shape[2]
    videos = _takes_videos(vae)
    given = vae.encode(pixels if videos else pixels.transpose(1, 2).flatten(0, 1))
    if hasattr(given, "latent_dist"):
        latents: Tensor = given.latent_dist.mode()
    elif hasattr(given, "latent"):
        latents = given.latent
    else:
        raise user_error(
            f"{type(vae).__name__}.encode() gives {type(given).__name__}, which has no `latent_dist` and no `latent`",
            help=(
                "write an encoder of your own: a module with load(clip, device) and forward(loaded): docs/your_model.md"
            ),
        )
    if not videos:
        latents = _videos(latents, frames)
    mean, std, factor = _scale(vae, latents)
    return (latents - mean) / std * factor


def decode(vae: Any, latents: Tensor) -> Tensor:
    """Pixels ``[B, 3, frames, height, width]`` of latents as the transformer gives them."""
    mean, std, factor = _scale(vae, latents)
    latents = latents * (std / factor) + mean
    if not _takes_videos(vae):
        return _videos(vae.decode(latents.transpose(1, 2).flatten(0, 1)).sample, latents.shape[2])
    if _config(vae, "timestep_conditioning"):
        # LTX's pipeline decodes at time zero, without noise, where nothing else is asked for.
        timed: Tensor = vae.decode(latents, latents.new_zeros(len(latents))).sample
        return timed
    pixels: Tensor = vae.decode(latents).sample
    return pixels


def _takes_videos(vae: nn.Module) -> bool:
    """Whether its encoder has a third dimension: a VAE of images takes frames as its batch."""
    encoder = getattr(vae, "encoder", None)
    layers = list(encoder.modules()) if isinstance(encoder, nn.Module) else []
    return any(isinstance(m, nn.Conv3d) for m in layers) or not any(isinstance(m, nn.Conv2d) for m in layers)


def _videos(images: Tensor, frames: int) -> Tensor:
    return images.reshape(-1, frames, *images.shape[1:]).transpose(1, 2)


def _scale(vae: nn.Module, latents: Tensor) -> tuple[Tensor | float, Tensor | float, float]:
    """Mean, standard deviation and factor. Raises ``UserError``."""
    if _config(vae, "batch_norm_eps") is not None:
        raise unknown_scale_error(type(vae).__name__, "it has a batch norm over patches")
    factor = float(_config(vae, "scaling_factor") or 1.0)
    # LTX's are weights, other VAEs' are settings.
    weights = dict(vae.named_buffers(recurse=False))
    mean, std = (weights[name] if name in weights else _config(vae, name) for name in STATS)
    if mean is None and std is None:
        return float(_config(vae, "shift_factor") or 0.0), 1.0, factor
    if mean is None or std is None:
        missing = STATS[0] if mean is None else STATS[1]
        raise unknown_scale_error(type(vae).__name__, f"it has no {missing}")
    return _per_channel(vae, mean, latents), _per_channel(vae, std, latents), factor


def _config(vae: nn.Module, name: str) -> Any:
    return getattr(getattr(vae, "config", None), name, None)


def _per_channel(vae: nn.Module, values: Any, latents: Tensor) -> Tensor:
    """``[1, channels, 1 or frames, 1, 1]``: Cosmos has a value for every channel and frame."""
    flat = torch.as_tensor(values).flatten()
    channels, frames = latents.shape[1:3]
    known = flat.numel() // channels
    if flat.numel() % channels or known not in (1, *range(frames, known + 1)):
        reason = f"{flat.numel()} values of {STATS[0]} and {STATS[1]} for {channels} channels and {frames} frames"
        raise unknown_scale_error(type(vae).__name__, reason)
    spread = flat.view(1, channels, known, 1, 1)[:, :, :frames]
    return spread.to(latents.device, latents.dtype)
