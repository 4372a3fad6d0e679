"""Diffusers' SkyReels V2 without diffusion forcing."""

from diffusers import SkyReelsV2Transformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return SkyReelsV2Transformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2,
    )  # fmt: skip


sample = called
