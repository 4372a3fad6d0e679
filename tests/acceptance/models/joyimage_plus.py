"""Diffusers' JoyImage with references: dual blocks over patches of the video and of an image that it follows."""

from diffusers import JoyImageEditPlusTransformer3DModel
from parts import fixed, latent_shape, loss, noised  # noqa: F401


def build():
    return JoyImageEditPlusTransformer3DModel(
        in_channels=4, hidden_size=48, num_attention_heads=3, text_dim=16, mlp_width_ratio=2.0, num_layers=2,
        rope_dim_list=[4, 6, 6],
    )  # fmt: skip


def patches(x):
    """[1, patches, C, 1, 2, 2] of latents [1, C, F, H, W]."""
    return x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).permute(0, 2, 3, 5, 1, 4, 6).flatten(1, 3).unsqueeze(3)


def sample(clip, generator):
    x, t, _ = noised(clip, generator, latent_shape(clip))
    frames, height, width = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
    reference = fixed((1, 4, 1, *x.shape[3:]), f"reference/{clip.id}")
    both = patches(x).new_empty(1, (frames + 1) * height * width, 4, 1, 2, 2)
    both[:, : frames * height * width], both[:, frames * height * width :] = patches(x), patches(reference)
    return {
        "hidden_states": both,
        "timestep": 1000 * t,
        "encoder_hidden_states": fixed((1, clip.text_tokens, 16), f"text/{clip.id}"),
        "shape_list": [[(frames, height, width), (1, height, width)]],
        "return_dict": False,
    }, fixed(both.shape, f"target/{clip.id}") + 0 * t
