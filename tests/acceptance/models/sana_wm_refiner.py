"""Diffusers' refiner of SANA-WM: the video blocks of LTX-2, whose rotary positions the caller makes."""

from diffusers import SanaWMLTX2RefinerTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return SanaWMLTX2RefinerTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=12, cross_attention_dim=36,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=3, audio_attention_head_dim=4,
        audio_cross_attention_dim=12, num_layers=2, caption_channels=16,
    )  # fmt: skip


POSITIONS = build()


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip, patch=(1, 1, 1)))
    frames, height, width = x.shape[2:]
    tokens = [y.flatten(2).transpose(1, 2) for y in (x, target)]
    return {
        "hidden_states": tokens[0],
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "timestep": 1000 * t[:, None].repeat(1, tokens[0].shape[1]),
        "video_rotary_emb": POSITIONS.build_rotary_emb_for_absolute_positions(
            1, list(range(frames)), height, width, x.device, 24.0
        ),
        "return_dict": False,
    }, tokens[1]
