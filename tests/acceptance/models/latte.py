"""Diffusers' Latte: spatial and temporal blocks in turn."""

from diffusers import LatteTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return LatteTransformer3DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, dropout=0.0,
        cross_attention_dim=24, attention_bias=True, sample_size=8, patch_size=2, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, caption_channels=16,
        video_length=5,
    )  # fmt: skip


def sample(clip, generator):
    return called(clip, generator, enable_temporal_attentions=True)
