"""Wan (arXiv 2503.20314) in Diffusers: ``WanTransformer3DModel``, trained by flow matching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arachnec.data.clip import VideoClip
from arachnec.models.diffusers import common
from arachnec.models.diffusers.tokenizations import WAN_TOKENS, OfFolder
from arachnec.models.precision import arguments_in, in_precision

MODULE = "diffusers.models.transformers.transformer_wan"
WAN_2_1 = {
    "patch_size": (1, 2, 2),
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
# The transformer/config.json of Wan-AI's checkpoints, e.g. huggingface.co/Wan-AI/Wan2.1-T2V-14B-Diffusers.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "Wan2.1-T2V-1.3B": {**WAN_2_1, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "Wan2.1-T2V-14B": {**WAN_2_1, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    # either of its two experts
    "Wan2.2-T2V-A14B": {**WAN_2_1, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
}


@dataclass(frozen=True)
class WanTextToVideo(OfFolder):
    """``build``, ``sample`` and ``loss`` of a model file. See ``text_to_video``."""

    config: Mapping[str, Any]
    text_length: int | None
    dtype: torch.dtype = torch.float32
    folder: Path | None = None  # of the pretrained weights
    stride: tuple[int, int, int] = (4, 8, 8)
    levels: tuple[float, float] = (0.0, 1.0)  # of noise that the model is for

    @property
    def geometry(self) -> common.Geometry:
        time, height, width = self.config["patch_size"]
        return common.Geometry(self.config["in_channels"], (time, height, width), self.stride)

    def build(self) -> torch.nn.Module:
        return in_precision(common.constructor(MODULE, "WanTransformer3DModel")(**self.config), self.dtype)

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
        x0, tokens = common.latents(clip, self.geometry), self.geometry.tokens(clip)
        x_t, timestep, target = common.flow_matching(x0, generator, common.timesteps_of(clip), tokens, self.levels)
        text, _ = common.text_embeddings(clip, "Wan", self.config["text_dim"], self.text_length)
        arguments = {
            "hidden_states": x_t,
            "timestep": timestep,
            "encoder_hidden_states": text,
            "return_dict": False,
        }
        return arguments_in(arguments, self.dtype), target

    loss = staticmethod(common.mean_squared_error)


def text_to_video(
    name: str | None = None, /, *, text_length: int | None = None, dtype: torch.dtype = torch.float32, **config: Any
) -> WanTextToVideo:
    """A named configuration, or that in a folder of pretrained weights, with ``config`` laid over it.

    Without a name, the class's defaults with ``config``.

    The model reads a clip's ``text_tokens`` text tokens as they are; ``text_length`` (512 in Wan's own training) pads
    all captions with zeros to one length instead, as the model was pretrained; of a pipeline's folder it is 512 where
    nothing is given. ``dtype`` is the precision of the
    weights and of what the model is given. The stride of latents is that of the folder's VAE, and one of two experts
    trains on its own side of the folder's ``boundary_ratio``. Raises ``UserError`` for an unknown name or key.
    """
    model = common.constructor(MODULE, "WanTransformer3DModel")
    config, folder = common.configuration("Wan", model, CONFIGURATIONS, name, config), common.folder_of(name)
    if text_length is None and folder is not None and common.is_of_pipeline(folder):
        text_length = WAN_TOKENS  # to which the pipeline pads
    strides, levels = common.strides_of(name), common.noise_levels_of(name)
    return WanTextToVideo(config, text_length, dtype, folder, strides, levels)
