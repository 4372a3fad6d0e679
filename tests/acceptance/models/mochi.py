"""Diffusers' Mochi: asymmetric joint attention that drops padded text by its mask."""

import torch
from diffusers import MochiTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return MochiTransformer3DModel(
        patch_size=2, num_attention_heads=3, attention_head_dim=16, num_layers=2, pooled_projection_dim=16,
        in_channels=4, text_embed_dim=16, time_embed_dim=16, max_sequence_length=30,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {
        "hidden_states": x,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "timestep": 1000 * t,
        "encoder_attention_mask": torch.ones(1, clip.text_tokens, dtype=torch.bool),
        "return_dict": False,
    }, target
