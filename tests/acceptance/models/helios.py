"""Diffusers' Helios: Wan's blocks, here without the history of earlier frames."""

from diffusers import HeliosTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return HeliosTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=48, num_layers=2, rope_dim=(4, 4, 4), zero_history_timestep=False, has_multi_term_memory_patch=False,
        guidance_cross_attn=False,
    )  # fmt: skip


sample = called
