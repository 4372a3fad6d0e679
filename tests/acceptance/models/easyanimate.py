"""Diffusers' EasyAnimate: an MMDiT with rotary positions."""

from diffusers import EasyAnimateTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return EasyAnimateTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2, sample_width=12,
        sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=8, text_embed_dim=16,
    )  # fmt: skip


sample = called
