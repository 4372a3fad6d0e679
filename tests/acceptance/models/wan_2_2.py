"""Wan2.2 TI2V: a timestep for every token, [B, S]; the first frame is given and has time 0."""

from diffusers import WanTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32,
        ffn_dim=32, num_layers=2,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    timesteps = (1000 * t).repeat(x.shape[2] * x.shape[3] * x.shape[4] // 4)
    if x.shape[2] > 1:
        timesteps[: x.shape[3] * x.shape[4] // 4] = 0
    return {
        "hidden_states": x,
        "timestep": timesteps[None],
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "return_dict": False,
    }, target
