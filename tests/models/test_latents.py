"""Latents are scaled as each VAE's own pipeline does it, both ways."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arachnec.ir.diagnostic import UserError
from arachnec.models.encoders import VideoEncoder
from arachnec.models.sampler_file import VideoDecoder
from tests.spmd import spatial_vaes

diffusers: Any = pytest.importorskip("diffusers")
MEAN, STD, FACTOR = (0.3, -0.2, 0.5, -0.7), (0.5, 1.5, 2.0, 0.25), 0.7
Way = Callable[[Tensor], Tensor]


def ltx() -> Any:
    vae: Any = spatial_vaes.ltx()
    vae.register_to_config(scaling_factor=FACTOR)
    return with_statistics(vae)


def ltx_2(**changes: Any) -> Any:
    return with_statistics(
        diffusers.AutoencoderKLLTX2Video(
            latent_channels=4, block_out_channels=(8,) * 4, decoder_block_out_channels=(8, 16, 32), patch_size=1,
            layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 4, scaling_factor=FACTOR, **changes,
        )
    )  # fmt: skip


def with_statistics(vae: Any) -> Any:
    vae.latents_mean.copy_(torch.tensor(MEAN))
    vae.latents_std.copy_(torch.tensor(STD))
    return vae


def mochi() -> Any:
    vae: Any = spatial_vaes.mochi()
    vae.register_to_config(scaling_factor=FACTOR)
    return vae


def cosmos() -> Any:
    """A mean and a deviation for each of 4 channels and 16 frames."""
    values = torch.randn((2, 4 * 16), generator=torch.Generator().manual_seed(1)).abs() + 0.1
    return diffusers.AutoencoderKLCosmos(
        latent_channels=4, encoder_block_out_channels=(8,) * 4, decode_block_out_channels=(8,) * 4, num_layers=1,
        attention_resolutions=(), latents_mean=values[0].tolist(), latents_std=values[1].tolist(),
    )  # fmt: skip


def images(**changes: Any) -> Any:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4), layers_per_block=1, norm_num_groups=2, latent_channels=4, scaling_factor=FACTOR,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **changes,
    )  # fmt: skip


def compression() -> Any:
    return diffusers.AutoencoderDC(
        latent_channels=4, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), scaling_factor=FACTOR,
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), attention_head_dim=4,
        encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()),
    )  # fmt: skip


def ltx_way(pipeline: Any, vae: Any) -> tuple[Way, Way]:
    numbers = vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    return lambda x: pipeline._normalize_latents(x, *numbers), lambda x: pipeline._denormalize_latents(x, *numbers)


def motif_way(vae: Any) -> tuple[Way, Way]:
    pipeline, numbers = diffusers.MotifVideoPipeline, (vae.config.latents_mean, vae.config.latents_std)
    return lambda x: pipeline._normalize_latents(x, *numbers), lambda x: pipeline._denormalize_latents(x, *numbers)


def mochi_way(vae: Any) -> tuple[Way, Way]:
    """As ``MochiPipeline.__call__``; there and back."""
    mean = torch.tensor(vae.config.latents_mean).view(1, 12, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, 12, 1, 1, 1)
    return lambda x: (x - mean) / (std / FACTOR), lambda x: x * std / FACTOR + mean


def cosmos_way(vae: Any) -> tuple[Way, Way]:
    """As ``CosmosVideoToWorldPipeline`` with a ``sigma_data`` of 1."""
    mean, std = (
        torch.tensor(values).view(1, vae.config.latent_channels, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (
        lambda x: (x - mean[:, :, : x.size(2)]) / std[:, :, : x.size(2)],
        lambda x: x * std[:, :, : x.size(2)] + mean[:, :, : x.size(2)],
    )


def factor_way(vae: Any) -> tuple[Way, Way]:
    return lambda x: x * vae.config.scaling_factor, lambda x: x / vae.config.scaling_factor


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Way, Way]]]] = {
    "Wan": (spatial_vaes.wan, motif_way),  # MotifVideo's VAE is Wan's
    "LTX": (ltx, lambda vae: ltx_way(diffusers.LTXPipeline, vae)),
    "LTX-2": (ltx_2, lambda vae: ltx_way(diffusers.LTX2Pipeline, vae)),
    "Mochi": (mochi, mochi_way),
    "Cosmos": (cosmos, cosmos_way),
    "HunyuanVideo": (spatial_vaes.hunyuan, factor_way),
    "HunyuanVideo 1.5": (spatial_vaes.hunyuan_1_5, factor_way),
    "CogVideoX": (spatial_vaes.cogvideox, factor_way),
}


def pixels(vae: Any, frames: int = 9) -> tuple[Tensor, Tensor]:
    """As loaded, and as the VAE takes them."""
    loaded = torch.randint(0, 256, (1, 3, frames, 32, 32), dtype=torch.uint8)
    return loaded, loaded / 127.5 - 1


NEWER = {
    "Wan": "MotifVideoPipeline",
    "LTX-2": "AutoencoderKLLTX2Video",
    "HunyuanVideo 1.5": "AutoencoderKLHunyuanVideo15",
}


def demand(name: str) -> None:
    """Skip where this Diffusers is older than what the test is of."""
    if not hasattr(diffusers, name):
        pytest.skip(f"Diffusers {diffusers.__version__} has no {name}")


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_videos_are_scaled_as_the_pipeline_does_it_there_and_back(name: str) -> None:
    demand(NEWER.get(name, "WanPipeline"))
    torch.manual_seed(0)
    make, way = CASES[name]
    vae = make().eval()
    normalize, denormalize = way(vae)
    loaded, floats = pixels(vae, 7 if name == "Mochi" else 9)
    raw = vae.encode(floats).latent_dist.mode()
    encoded = VideoEncoder(vae)(loaded)
    torch.testing.assert_close(encoded, normalize(raw), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(encoded, raw, rtol=1e-2)
    torch.testing.assert_close(
        VideoDecoder(vae)(encoded), vae.decode(denormalize(encoded)).sample, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_frames_first_gives_the_pixels_of_cogvideoxs_own_decoding() -> None:
    torch.manual_seed(0)
    vae: Any = spatial_vaes.cogvideox().eval()
    latents = torch.randn(1, 3, 2, 4, 4)
    own = SimpleNamespace(vae=vae, vae_scaling_factor_image=vae.config.scaling_factor)
    expected = diffusers.CogVideoXPipeline.decode_latents(own, latents)
    torch.testing.assert_close(VideoDecoder(vae, frames_first=True)(latents), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [images, compression])
@torch.no_grad()
def test_a_vae_of_images_encodes_frame_by_frame(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    vae = make().eval()
    loaded, floats = pixels(vae, 3)
    frames = []
    for number in range(3):
        given = vae.encode(floats[:, :, number])
        frames.append(FACTOR * (given.latent if hasattr(given, "latent") else given.latent_dist.mode()))
    encoded = VideoEncoder(vae)(loaded)
    torch.testing.assert_close(encoded, torch.stack(frames, dim=2), rtol=1e-4, atol=1e-5)
    back = torch.stack([vae.decode(frame / FACTOR).sample for frame in frames], dim=2)
    torch.testing.assert_close(VideoDecoder(vae)(encoded), back, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_shift_comes_before_the_factor() -> None:
    vae = images(shift_factor=0.2).eval()
    loaded, floats = pixels(vae, 1)
    expected = (vae.encode(floats[:, :, 0]).latent_dist.mode() - 0.2) * FACTOR
    torch.testing.assert_close(VideoEncoder(vae)(loaded)[:, :, 0], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_ltx_decodes_at_time_zero_where_its_vae_asks_for_a_time() -> None:
    demand("AutoencoderKLLTX2Video")
    torch.manual_seed(0)
    vae = ltx_2(timestep_conditioning=True).eval()
    latents = torch.randn(1, 4, 2, 2, 2)
    expected = vae.decode(ltx_way(diffusers.LTX2Pipeline, vae)[1](latents), torch.tensor([0.0])).sample
    torch.testing.assert_close(VideoDecoder(vae)(latents), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_schedulers_factor_multiplies_too() -> None:
    vae = cosmos().eval()
    loaded, _ = pixels(vae)
    plain, scaled = VideoEncoder(vae)(loaded), VideoEncoder(vae, factor=0.5)(loaded)
    torch.testing.assert_close(scaled, plain * 0.5)
    torch.testing.assert_close(VideoDecoder(vae, factor=0.5)(scaled), VideoDecoder(vae)(plain), rtol=1e-4, atol=1e-5)


def test_what_is_not_known_is_refused() -> None:
    loaded = torch.zeros((1, 3, 25, 32, 32), dtype=torch.uint8)
    short = cosmos()
    short.register_to_config(latents_mean=[0.0] * 8, latents_std=[1.0] * 8)
    with pytest.raises(UserError, match="8 values of latents_mean and latents_std for 4 channels and 4 frames"):
        VideoEncoder(short)(loaded)
    half: Any = spatial_vaes.wan()
    half.register_to_config(latents_std=None)
    with pytest.raises(UserError, match="of AutoencoderKLWan are scaled is not known here: it has no latents_std"):
        VideoEncoder(half)(loaded)
    demand("AutoencoderKLFlux2")
    patches = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4, 4), layers_per_block=1, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    with pytest.raises(UserError, match="it has a batch norm over patches"):
        VideoEncoder(patches)(loaded)
    with pytest.raises(UserError, match=r"Other.encode\(\) gives SimpleNamespace"):
        VideoEncoder(Other())(loaded)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv3d(3, 3, 1)

    def encode(self, _: Tensor) -> object:
        return SimpleNamespace(codes=None)
