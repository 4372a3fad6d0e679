"""Diffusers' VAEs, as small as they can be."""

from torch import nn


def wan() -> nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=2, dim_mult=[1, 2, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1] * 2, latents_std=[0.9] * 2,
    )  # fmt: skip


def wan_residual() -> nn.Module:
    """Wan 2.2's: patches, and shortcuts that average."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=2, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True], is_residual=True,
        in_channels=12, out_channels=12, patch_size=2, latents_mean=[0.1] * 2, latents_std=[0.9] * 2,
    )  # fmt: skip


def cogvideox() -> nn.Module:
    from diffusers import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4), latent_channels=2, layers_per_block=1, norm_num_groups=2
    )


def hunyuan() -> nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        block_out_channels=(4, 4, 4, 4), latent_channels=2, layers_per_block=1, norm_num_groups=2
    )


def hunyuan_1_5() -> nn.Module:
    from diffusers import AutoencoderKLHunyuanVideo15

    return AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=8
    )


def ltx() -> nn.Module:
    from diffusers import AutoencoderKLLTXVideo

    return AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5, patch_size=1,
    )  # fmt: skip


def magvit() -> nn.Module:
    """EasyAnimate's."""
    from diffusers import AutoencoderKLMagvit

    return AutoencoderKLMagvit(latent_channels=2, block_out_channels=[4] * 4, layers_per_block=1, norm_num_groups=2)


def mochi() -> nn.Module:
    from diffusers import AutoencoderKLMochi

    return AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4, layers_per_block=(1,) * 5
    )


def spread(vae: nn.Module) -> nn.Module:
    for parameter in vae.parameters():  # what is zero at first would hide mistakes
        nn.init.normal_(parameter, std=0.2)
    return vae
