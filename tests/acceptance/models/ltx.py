"""Diffusers' LTX-Video: the model takes tokens, and the grid as numbers."""

import torch
from diffusers import LTXVideoTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=12, cross_attention_dim=36,
        num_layers=2, caption_channels=16,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip, 8, (4, 16, 16), (1, 1, 1)))
    frames, height, width = x.shape[2:]
    x, target = (y.flatten(2).transpose(1, 2) for y in (x, target))
    return {
        "hidden_states": x,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "timestep": 1000 * t,
        "encoder_attention_mask": (torch.arange(clip.text_tokens) < max(1, clip.text_tokens - 2))[None].long(),
        "num_frames": frames,
        "height": height,
        "width": width,
        "return_dict": False,
    }, target
