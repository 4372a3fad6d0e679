"""The adapters for Diffusers: real configurations, sizes, objectives, and what reaches the models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.models.batch import clip_generator, make_batch, prediction_of
from arachnec.models.file import load_model_file

pytest.importorskip("diffusers")
from arachnec.models.diffusers import cogvideox, common, hunyuan_video, wan

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIP = VideoClip("a", 5, 32, 48, 6, "a cat")
TINY: dict[str, Any] = {
    "wan": wan.text_to_video(
        num_layers=1, num_attention_heads=2, attention_head_dim=12, ffn_dim=32, text_dim=16,
        in_channels=4, out_channels=4,
    ),
    "cogvideox-sincos": cogvideox.text_to_video(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, text_embed_dim=16, time_embed_dim=8,
        in_channels=4, out_channels=4, max_text_seq_length=8, sample_frames=5, sample_height=4, sample_width=6,
    ),
    "cogvideox-rotary": cogvideox.text_to_video(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, text_embed_dim=16, time_embed_dim=8,
        in_channels=4, out_channels=4, sample_height=4, sample_width=6, use_rotary_positional_embeddings=True,
    ),
    "cogvideox-1.5": cogvideox.text_to_video(
        num_layers=1, num_attention_heads=2, attention_head_dim=16, text_embed_dim=16, time_embed_dim=8, in_channels=4,
        out_channels=4, sample_height=300, sample_width=300, patch_size_t=2, ofs_embed_dim=8,
        use_rotary_positional_embeddings=True,
    ),
    "hunyuan_video": hunyuan_video.text_to_video(
        num_layers=1, num_single_layers=1, num_refiner_layers=1, num_attention_heads=2, attention_head_dim=16,
        rope_axes_dim=(4, 6, 6), text_embed_dim=16, pooled_projection_dim=8, in_channels=4, out_channels=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_models_take_what_the_adapters_make(name: str, device: str) -> None:
    adapter = TINY[name]
    with torch.device(device):
        model = adapter.build()
    clips = [VideoClip("a", 5, 32, 48, 6, "a cat"), VideoClip("b", 5, 32, 48, 6, "a dog")]
    arguments, target = make_batch(adapter_file(adapter), clips, 0, 0, device)
    prediction = prediction_of(model(**arguments))
    assert prediction.shape == target.shape and prediction.device.type == device
    assert adapter.loss(prediction, target).shape == ()


@pytest.mark.parametrize("name", TINY)
def test_the_loss_of_a_batch_of_equal_clips_is_the_mean_of_theirs(name: str) -> None:
    adapter = TINY[name]
    torch.manual_seed(0)
    model = adapter.build()
    clips = [VideoClip(id, 5, 32, 48, 6, f"clip {id}") for id in range(3)]

    def loss(batch: list[VideoClip]) -> torch.Tensor:
        arguments, target = make_batch(adapter_file(adapter), batch, 0, 0, "cpu")
        return adapter.loss(prediction_of(model(**arguments)), target)

    torch.testing.assert_close(loss(clips), torch.stack([loss([clip]) for clip in clips]).mean())


def adapter_file(adapter: Any) -> Any:
    """A loaded model file that holds this adapter."""

    class File:
        sample = staticmethod(adapter.sample)

        @staticmethod
        def span(name: str) -> None:
            return None

    return File


@pytest.mark.parametrize(
    ("example", "parameters"),
    [
        ("wan2_1_1_3b", 1_418_996_800),
        ("wan2_1_14b", 14_288_491_584),
        ("cogvideox_2b", 1_693_783_872),
        ("cogvideox_5b", 5_570_283_072),
        ("hunyuanvideo", 12_821_012_544),
    ],
)
def test_a_real_configuration_builds_without_memory_and_has_the_real_size(example: str, parameters: int) -> None:
    model_file = load_model_file(EXAMPLES / f"{example}.py")
    with torch.device("meta"):
        model = model_file.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    arguments, target = make_batch(model_file, [VideoClip(0, 5, 64, 96, 20)], 0, 0, "meta")
    assert prediction_of(model(**arguments)).shape == target.shape


def test_tokens_are_those_of_the_papers() -> None:
    geometry = wan.text_to_video("Wan2.1-T2V-14B").geometry
    sizes = {(81, 480, 832): 32_760, (81, 720, 1280): 75_600, (129, 720, 1280): 118_800, (1, 480, 832): 1_560}
    assert {size: geometry.tokens(VideoClip(0, *size, 0)) for size in sizes} == sizes


def test_a_size_that_does_not_divide_is_rounded_up_to_whole_patches() -> None:
    clip = VideoClip(0, 6, 33, 50, 6)
    adapter = TINY["wan"]
    assert adapter.geometry.patches(clip) == (2, 3, 4)
    arguments, target = adapter.sample(clip, clip_generator(0, 0, 0))
    assert arguments["hidden_states"].shape == target.shape == (1, 4, 2, 6, 8)


def test_the_model_and_the_adapter_count_the_same_tokens() -> None:
    adapter = TINY["wan"]
    model = adapter.build()
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].shape[1]))
    arguments, _ = adapter.sample(CLIP, clip_generator(0, 0, "a"))
    model(**arguments)
    assert seen == [adapter.geometry.tokens(CLIP)]


def test_flow_matching_goes_from_data_to_noise_in_a_straight_line() -> None:
    x0 = torch.randn(1, 2, 3)
    x_t, timestep, target = common.flow_matching(x0, torch.Generator().manual_seed(0))
    t = timestep / 1000
    torch.testing.assert_close(x_t - t * target, x0)
    assert 0 <= t < 1


@pytest.mark.parametrize("name", ["CogVideoX-2B", "CogVideoX-5B"])
def test_v_prediction_is_that_of_the_models_own_scheduler(name: str) -> None:
    from diffusers import CogVideoXDDIMScheduler

    shift = cogvideox.SNR_SHIFT[name]
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=shift,
        beta_schedule="scaled_linear",
    )
    x0 = torch.randn(1, 3, 2, 4, 4)
    alphas = cogvideox.alphas_cumprod(shift)
    x_t, timestep, target = cogvideox.velocity_prediction(x0, alphas, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    torch.rand(1, generator=generator)
    noise = torch.randn(x0.shape, generator=generator)
    torch.testing.assert_close(x_t, scheduler.add_noise(x0, noise, timestep))
    torch.testing.assert_close(target, scheduler.get_velocity(x0, noise, timestep))


@pytest.mark.parametrize("name", ["cogvideox-rotary", "cogvideox-1.5"])
def test_rotary_tables_are_those_of_the_pipeline(name: str) -> None:
    from diffusers import CogVideoXPipeline

    adapter = TINY[name]
    pipeline = CogVideoXPipeline(None, None, None, adapter.build(), None)
    pipeline.vae_scale_factor_spatial = 8
    arguments, _ = adapter.sample(CLIP, clip_generator(0, 0, "a"))
    frames = arguments["hidden_states"].shape[1]
    expected = pipeline._prepare_rotary_positional_embeddings(CLIP.height, CLIP.width, frames, torch.device("cpu"))
    for own, theirs in zip(arguments["image_rotary_emb"], expected, strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("name", TINY)
def test_text_and_synthetic_latents_are_the_same_in_every_step(name: str) -> None:
    first, second = (TINY[name].sample(CLIP, clip_generator(0, step, "a"))[0] for step in (0, 1))
    assert torch.equal(first["encoder_hidden_states"], second["encoder_hidden_states"])
    assert not torch.equal(first["hidden_states"], second["hidden_states"])
    assert torch.equal(common.latents(CLIP, TINY[name].geometry), common.latents(CLIP, TINY[name].geometry))


def test_captions_are_read_at_their_own_length_unless_one_length_is_asked_for() -> None:
    padded = wan.text_to_video(**TINY["wan"].config, text_length=9)
    own = TINY["wan"].sample(CLIP, clip_generator(0, 0, "a"))[0]["encoder_hidden_states"]
    longer = padded.sample(CLIP, clip_generator(0, 0, "a"))[0]["encoder_hidden_states"]
    assert own.shape == (1, 6, 16) and longer.shape == (1, 9, 16)
    assert torch.equal(longer[:, :6], own) and not longer[:, 6:].any()


def test_hunyuan_video_hides_padding_behind_its_mask() -> None:
    config = dict(TINY["hunyuan_video"].config)
    arguments, _ = hunyuan_video.text_to_video(**config, text_length=9).sample(CLIP, clip_generator(0, 0, "a"))
    assert arguments["encoder_attention_mask"].tolist() == [[True] * 6 + [False] * 3]


def test_encoded_latents_and_text_take_the_place_of_synthetic_ones() -> None:
    latents, text = torch.ones(1, 4, 2, 4, 6), torch.ones(1, 6, 16)
    clip = VideoClip("a", 5, 32, 48, 6, "a cat", encoded={"vae": latents, "text": text})
    arguments, target = TINY["wan"].sample(clip, clip_generator(0, 0, "a"))
    t = arguments["timestep"] / 1000
    torch.testing.assert_close(arguments["hidden_states"] - t * target, latents)
    assert arguments["encoder_hidden_states"] is text


def test_precomputed_latents_are_read_from_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    latents = torch.randn(4, 2, 4, 6)
    save_file({"latents": latents}, tmp_path / "a.safetensors")
    clip = VideoClip("a", 5, 32, 48, 6, path=tmp_path / "a.safetensors")
    assert torch.equal(common.latents(clip, TINY["wan"].geometry), latents[None])
    (tmp_path / "b.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        common.latents(VideoClip("b", 5, 32, 48, 6, path=tmp_path / "b.safetensors"), TINY["wan"].geometry)


@pytest.mark.parametrize(
    ("clip", "title"),
    [
        (VideoClip(7, 5, 32, 48, 0), "clip `7` has no text tokens, and CogVideoX attends to text"),
        (VideoClip(7, 5, 32, 48, 9), "clip `7` has 9 text tokens, and CogVideoX takes 8"),
        (
            VideoClip(7, 5, 32, 48, 6, encoded={"vae": torch.zeros(1, 4, 2, 4, 4)}),
            "the latents of clip `7` are 1 x 4 x 2 x 4 x 4, expected 1 x 4 x 2 x 4 x 6",
        ),
    ],
)
def test_a_clip_that_does_not_suit_the_model_is_refused(clip: VideoClip, title: str) -> None:
    with pytest.raises(UserError) as caught:
        TINY["cogvideox-sincos"].sample(clip, clip_generator(0, 0, 7))
    assert str(caught.value) == title


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("stored", [False, True])
def test_a_sample_can_be_made_of_shapes_alone(name: str, stored: bool, tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    path = tmp_path / "latents.safetensors" if stored else None  # not there: shapes need no file
    with FakeTensorMode(allow_non_fake_inputs=True):
        arguments, target = TINY[name].sample(VideoClip("a", 5, 32, 48, 6, path=path), clip_generator(0, 0, "a"))
    assert isinstance(target, FakeTensor)
    assert all(isinstance(value, FakeTensor) for value in arguments.values() if isinstance(value, torch.Tensor))
