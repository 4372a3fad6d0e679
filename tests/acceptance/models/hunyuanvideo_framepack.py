"""Diffusers' FramePack: HunyuanVideo's blocks, tokens of clean and earlier frames beside the noisy ones."""

import torch
from diffusers import HunyuanVideoFramepackTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return HunyuanVideoFramepackTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2,
        num_single_layers=2, num_refiner_layers=1, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6), has_image_proj=True, image_proj_dim=12, has_clean_x_embedder=True,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    frames = x.shape[2]
    return {
        "hidden_states": x,
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "encoder_attention_mask": torch.ones(1, clip.text_tokens, dtype=torch.long),
        "pooled_projections": fixed((1, 8), f"pooled/{clip.id}"),
        "image_embeds": fixed((1, 5, 12), f"image/{clip.id}"),
        "indices_latents": torch.arange(1, frames + 1),
        "guidance": torch.full((1,), 6.0),
        "latents_clean": fixed((1, 4, 1, *x.shape[3:]), f"clean/{clip.id}"),
        "indices_latents_clean": torch.zeros(1),
        "latents_history_2x": fixed((1, 4, 2, *x.shape[3:]), f"earlier/{clip.id}"),
        "indices_latents_history_2x": torch.arange(2),
        "latents_history_4x": fixed((1, 4, 4, *x.shape[3:]), f"earliest/{clip.id}"),
        "indices_latents_history_4x": torch.arange(4),
        "return_dict": False,
    }, target
