"""Diffusers' LTX-2: streams of video and sound that attend to each other."""

from diffusers import LTX2VideoTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401

SOUND = 6


def build():
    return LTX2VideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=3, attention_head_dim=12, cross_attention_dim=36,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=3, audio_attention_head_dim=8,
        audio_cross_attention_dim=24, num_layers=2, caption_channels=16,
    )  # fmt: skip


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip, 8, (4, 16, 16), (1, 1, 1)))
    frames, height, width = x.shape[2:]
    x, target = (y.flatten(2).transpose(1, 2) for y in (x, target))
    text = fixed((1, clip.text_tokens, 16), f"text/{clip.id}")
    return {
        "hidden_states": x,
        "audio_hidden_states": fixed((1, SOUND, 4), f"sound/{clip.id}"),
        "encoder_hidden_states": text,
        "audio_encoder_hidden_states": text,
        "timestep": 1000 * t,
        "num_frames": frames,
        "height": height,
        "width": width,
        "audio_num_frames": SOUND,
        "return_dict": False,
    }, target
