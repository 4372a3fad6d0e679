"""Diffusers' EasyAnimate: an MMDiT with rotary positions."""

from diffusers import EasyAnimateTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return EasyAnimateTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2, sample_width=12,
        sample_height=8, num_layers=2, mmdit_layers=1, time_embed_dim=8, text_embed_dim=16,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {
        "hidden_states": x,
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "return_dict": False,
    }, target
