"""Diffusers' SANA-Video: linear attention and a convolution over space and time in every block."""

from diffusers import SanaVideoTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16,
        mlp_ratio=2.0, sample_size=8,
    )  # fmt: skip


sample = called
