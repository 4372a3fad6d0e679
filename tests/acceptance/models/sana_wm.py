"""Diffusers' SANA-WM: a recurrence over frames, softmax attention in every second block, and a camera's path."""

import torch
from diffusers import SanaWMTransformer3DModel
from parts import fixed, latent_shape, loss, noised, reset  # noqa: F401


def build():
    model = SanaWMTransformer3DModel(
        in_channels=4, num_layers=2, hidden_size=24, num_attention_heads=2, softmax_every_n=2, linear_head_dim=12,
        chunk_plucker_channels=6, chunk_plucker_post_attn_blocks=2, caption_channels=16,
    )  # fmt: skip
    return reset(model)


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip, patch=(1, 1, 1)))
    frames, height, width = x.shape[2:]
    return {
        "hidden_states": x,
        "timestep": (1000 * t)[:, None, None].repeat(1, 1, frames),
        "encoder_hidden_states": fixed((1, 1, clip.text_tokens, 16), f"text/{clip.id}"),
        "encoder_attention_mask": torch.ones(1, clip.text_tokens, dtype=torch.int64),
        "chunk_plucker": fixed((1, 6, frames, height, width), f"camera/{clip.id}"),
        "return_dict": False,
    }, target
