"""HunyuanVideo (arXiv 2412.03603) in Diffusers: ``HunyuanVideoTransformer3DModel``, trained by flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arachnec.data.clip import VideoClip
from arachnec.models.diffusers import common
from arachnec.models.diffusers.tokenizations import OfFolder
from arachnec.models.precision import arguments_in, in_precision

MODULE = "diffusers.models.transformers.transformer_hunyuan_video"
# transformer/config.json of huggingface.co/hunyuanvideo-community/HunyuanVideo.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "HunyuanVideo": {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 20,
        "num_single_layers": 40,
        "num_refiner_layers": 2,
        "mlp_ratio": 4.0,
        "patch_size": 2,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "guidance_embeds": True,
        "text_embed_dim": 4096,
        "pooled_projection_dim": 768,
        "rope_theta": 256.0,
        "rope_axes_dim": (16, 56, 56),
    }
}
GUIDANCE = 1000.0  # a guidance scale of 1, in the unit of timesteps: none, which is what plain training has


@dataclass(frozen=True)
class HunyuanTextToVideo(OfFolder):
    """``build``, ``sample`` and ``loss`` of a model file. See ``text_to_video``."""

    config: Mapping[str, Any]
    text_length: int | None
    dtype: torch.dtype = torch.float32
    folder: Path | None = None  # of the pretrained weights
    stride: tuple[int, int, int] = (4, 8, 8)

    @property
    def geometry(self) -> common.Geometry:
        patch = self.config["patch_size"]
        return common.Geometry(self.config["in_channels"], (self.config["patch_size_t"], patch, patch), self.stride)

    def build(self) -> torch.nn.Module:
        return in_precision(common.constructor(MODULE, "HunyuanVideoTransformer3DModel")(**self.config), self.dtype)

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
        x0, tokens = common.latents(clip, self.geometry), self.geometry.tokens(clip)
        x_t, timestep, target = common.flow_matching(x0, generator, common.timesteps_of(clip), tokens)
        text, _ = common.text_embeddings(clip, "HunyuanVideo", self.config["text_embed_dim"], self.text_length)
        arguments = {
            "hidden_states": x_t,
            "timestep": timestep,
            "encoder_hidden_states": text,
            "encoder_attention_mask": common.shown_text(text),
            "pooled_projections": common.pooled_text(clip, self.config["pooled_projection_dim"]),
            "return_dict": False,
        }
        if self.config["guidance_embeds"]:
            arguments["guidance"] = torch.full_like(timestep, GUIDANCE)
        return arguments_in(arguments, self.dtype), target

    loss = staticmethod(common.mean_squared_error)


def text_to_video(
    name: str | None = None, /, *, text_length: int | None = None, dtype: torch.dtype = torch.float32, **config: Any
) -> HunyuanTextToVideo:
    """A named configuration, or that in a folder of pretrained weights, with ``config`` laid over it.

    Without a name, the class's defaults with ``config``.

    The model reads a clip's ``text_tokens`` text tokens; ``text_length`` (256 in HunyuanVideo's own training) pads all
    captions to one length instead. The attention mask hides what is padding, embeddings of zeros. The pooled text
    embedding is the output of an encoder named ``pooled``, ``[1, pooled_projection_dim]``; without one it is noise
    seeded by the caption.
    ``dtype`` is the precision of the weights and of what the model is given. Raises ``UserError`` for an unknown
    name or key.
    """
    model = common.constructor(MODULE, "HunyuanVideoTransformer3DModel")
    config = common.configuration("HunyuanVideo", model, CONFIGURATIONS, name, config)
    folder, stride = common.folder_of(name), common.strides_of(name)
    return HunyuanTextToVideo(config, text_length, dtype, folder, stride)
