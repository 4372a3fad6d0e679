"""Diffusers' JoyImage: dual blocks over a video's tokens and text."""

from diffusers import JoyImageEditTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return JoyImageEditTransformer3DModel(
        in_channels=4, hidden_size=48, num_attention_heads=3, text_dim=16, mlp_width_ratio=2.0, num_layers=2,
        rope_dim_list=[4, 6, 6],
    )  # fmt: skip


sample = called
