"""Diffusers' Allegro: rotary tables from the caller, masks as biases."""

import torch
from diffusers import AllegroTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=4, out_channels=4, num_layers=2,
        cross_attention_dim=48, sample_height=8, sample_width=12, sample_frames=5, caption_channels=16,
    )  # fmt: skip


def rotary(frames, height, width):
    *tables, t, h, w = get_3d_rotary_pos_embed_allegro(
        embed_dim=24, crops_coords=((0, 0), (height, width)), grid_size=(height, width), temporal_size=frames,
        device="cpu",
    )  # fmt: skip
    places = torch.cartesian_prod(t.long(), h.long(), w.long()).reshape(-1, 3).transpose(0, 1).reshape(3, 1, -1)
    return tuple(tables), tuple(places.contiguous())


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {
        "hidden_states": x,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "timestep": 1000 * t,
        "encoder_attention_mask": torch.ones(1, clip.text_tokens),
        "attention_mask": torch.ones(1, *x.shape[2:]),
        "image_rotary_emb": rotary(x.shape[2], x.shape[3] // 2, x.shape[4] // 2),
        "return_dict": False,
    }, target
