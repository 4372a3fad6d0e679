"""Diffusers' Cosmos: learnable positions beside the rotary ones, modulation of low rank."""

from diffusers import CosmosTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2, mlp_ratio=2,
        text_embed_dim=16, adaln_lora_dim=4, max_size=(8, 32, 32), patch_size=(1, 2, 2), concat_padding_mask=False,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {
        "hidden_states": x,
        "timestep": t,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "fps": 24,
        "return_dict": False,
    }, target
