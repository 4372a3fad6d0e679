"""Diffusers' Kandinsky 6: blocks for video with sound, here without sound."""

from diffusers import Kandinsky6Transformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return Kandinsky6Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=8, time_dim=16, model_dim=32, ff_dim=48,
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6), visual_cond=False, in_audio_dim=4,
        out_audio_dim=4,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    x, target = (y.permute(0, 2, 3, 4, 1) for y in (x, target))
    return {
        "hidden_states": x,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "pooled_projections": fixed((1, 8), f"pooled/{clip.id}"),
        "timestep": 1000 * t,
        "return_dict": False,
    }, target
