"""Diffusers' Wan-Animate: Wan's blocks with a pose, and a face that some of them read."""

from diffusers import WanAnimateTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return WanAnimateTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=12, latent_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=48, num_layers=2, image_dim=16, added_kv_proj_dim=36,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8}, motion_encoder_size=16, motion_style_dim=8,
        motion_dim=4, motion_encoder_dim=8, face_encoder_hidden_dim=8, face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )  # fmt: skip


def sample(clip, generator):
    x, t, _ = noised(clip, generator, latent_shape(clip))
    frames, height, width = x.shape[2:]
    reference = fixed((1, 12, frames + 1, height, width), f"reference/{clip.id}")
    reference[:, :4, 1:] = x
    return {
        "hidden_states": reference,
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "encoder_hidden_states_image": fixed((1, 5, 16), f"image/{clip.id}"),
        "pose_hidden_states": fixed((1, 4, frames, height, width), f"pose/{clip.id}"),
        "face_pixel_values": fixed((1, 3, 4 * (frames - 1) + 1, 16, 16), f"face/{clip.id}"),
        "return_dict": False,
    }, fixed((1, 4, frames + 1, height, width), f"target/{clip.id}") + 0 * t
