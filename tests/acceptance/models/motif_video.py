"""Diffusers' Motif-Video: dual, single and decoder blocks."""

import torch
from diffusers import MotifVideoTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return MotifVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2, num_single_layers=2,
        num_decoder_layers=1, mlp_ratio=2.0, text_embed_dim=16, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def sample(clip, generator):
    return called(clip, generator, encoder_attention_mask=torch.ones(1, clip.text_tokens))
