"""Diffusers' Mochi: asymmetric joint attention that drops padded text by its mask."""

import torch
from diffusers import MochiTransformer3DModel
from parts import called, loss  # noqa: F401


def build():
    return MochiTransformer3DModel(
        patch_size=2, num_attention_heads=3, attention_head_dim=16, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=16, max_sequence_length=30,
    )  # fmt: skip


def sample(clip, generator):
    return called(clip, generator, encoder_attention_mask=torch.ones(1, clip.text_tokens, dtype=torch.bool))
