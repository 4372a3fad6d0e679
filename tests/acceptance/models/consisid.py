"""Diffusers' ConsisID: CogVideoX's blocks with rotary places, without a face."""

from diffusers import ConsisIDTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return ConsisIDTransformer3DModel(
        num_attention_heads=3, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=16,
        text_embed_dim=16, num_layers=2, sample_width=16, sample_height=12, sample_frames=17, max_text_seq_length=30,
        use_rotary_positional_embeddings=True,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    tokens = x.shape[2] * (x.shape[3] // 2) * (x.shape[4] // 2)
    angles = fixed((tokens, 16), f"angles/{tokens}")
    return {
        "hidden_states": x.transpose(1, 2),
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "timestep": 1000 * t,
        "image_rotary_emb": (angles.cos(), angles.sin()),
        "return_dict": False,
    }, target.transpose(1, 2)
