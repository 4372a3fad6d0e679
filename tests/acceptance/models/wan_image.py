"""Wan image to video: a second cross-attention, to tokens of the first frame."""

from diffusers import WanTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2, image_dim=20, added_kv_proj_dim=24,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {
        "hidden_states": x,
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, 512, 16), f"text/{clip.id}"),
        "encoder_hidden_states_image": fixed((1, 7, 20), f"image/{clip.id}"),
        "return_dict": False,
    }, target
