"""Diffusers' HunyuanVideo 1.5."""

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2, num_refiner_layers=1,
        mlp_ratio=2.0, text_embed_dim=16, text_embed_2_dim=12, image_embed_dim=12, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip, 4, (4, 16, 16), (1, 1, 1)))
    condition = torch.zeros(1, 5, *x.shape[2:])
    tokens = clip.text_tokens
    return {
        "hidden_states": torch.cat([x, condition], dim=1),
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, tokens, 16), f"text/{clip.id}"),
        "encoder_attention_mask": torch.ones(1, tokens, dtype=torch.bool),
        "encoder_hidden_states_2": fixed((1, 6, 12), f"glyphs/{clip.id}"),
        "encoder_attention_mask_2": torch.ones(1, 6, dtype=torch.bool),
        "image_embeds": torch.zeros(1, 4, 12),
        "return_dict": False,
    }, target
