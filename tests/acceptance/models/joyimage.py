"""Diffusers' JoyImage: dual blocks over a video's tokens and text."""

from diffusers import JoyImageEditTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return JoyImageEditTransformer3DModel(
        in_channels=4, hidden_size=48, num_attention_heads=3, text_dim=16, mlp_width_ratio=2.0, num_layers=2,
        rope_dim_list=[4, 6, 6],
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {
        "hidden_states": x,
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "return_dict": False,
    }, target
