"""Diffusers' MiniMax H3: one packed sequence of text, video and sound, whose rows are told by lists of places."""

import torch
from diffusers import MiniMaxH3Transformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401

SOUND = 3  # rows


def build():
    return MiniMaxH3Transformer3DModel(
        num_attention_heads=3, attention_head_dim=12, hidden_size=36, num_layers=2, num_refiner_layers=1, ffn_dim=48,
        in_channels=4, audio_in_channels=4, text_dim=16, freq_dim=32, time_embed_hidden_dim=36, time_embed_dim=16,
        rope_freq_dim=2,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    frames, height, width = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
    text, video = clip.text_tokens, frames * height * width
    rows = torch.arange(text + video + SOUND)
    tags = torch.cat([torch.full((n,), tag) for n, tag in ((text, 1), (video, 0), (SOUND, 2))])
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width)).view(-1, 3)
    line = torch.zeros(text, 3, dtype=torch.int64), torch.zeros(SOUND, 3, dtype=torch.int64)
    return {
        "hidden_states": rows_of(x),
        "audio_hidden_states": fixed((1, SOUND, 4), f"sound/{clip.id}"),
        "encoder_hidden_states": fixed((1, text, 16), f"text/{clip.id}"),
        "timestep": t,
        "timestep_indices": torch.zeros_like(rows),
        "token_tags": tags,
        "position_ids": torch.cat([line[0], grid, line[1]]),
        "video_indices": rows[text : text + video],
        "audio_indices": rows[text + video :],
        "text_indices": rows[:text],
        "return_dict": False,
    }, rows_of(target)


def rows_of(x):
    """[1, patches, values] of latents [1, C, F, H, W]."""
    return x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 2, 3, 5, 1, 4, 6).flatten(1, 3).flatten(2)
