"""Diffusers' ChronoEdit: Wan's blocks with places in time that are skipped."""

from diffusers import ChronoEditTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return ChronoEditTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=48, num_layers=2,
    )  # fmt: skip


sample = called
