"""What a model file takes from a pipeline's folder: strides, an expert's noise levels, the encoders around a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from arachnec.data.clip import Timesteps, VideoClip
from arachnec.executable.training_options import Training, verified
from arachnec.ir.diagnostic import UserError
from arachnec.models.diffusers.common import draw_time
from arachnec.models.initial_weights import PIPELINE, encoder_folder

pytest.importorskip("diffusers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    transformer = {"_class_name": "WanTransformer3DModel", "in_channels": 48, "out_channels": 48}
    files = {
        "model_index.json": {"_class_name": "WanPipeline", "boundary_ratio": 0.875},
        "vae/config.json": {"scale_factor_spatial": 16, "scale_factor_temporal": 4, "z_dim": 48},
        "transformer/config.json": transformer,
        "transformer_2/config.json": transformer,
        "text_encoder/config.json": {},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("part", "levels"), [("", (0.875, 1.0)), ("transformer", (0.875, 1.0)), ("transformer_2", (0.0, 0.875))]
)
def test_strides_are_the_vae_s_and_an_expert_has_its_side_of_the_boundary(
    folder: Path, part: str, levels: tuple[float, float]
) -> None:
    from arachnec.models.diffusers import wan

    model = wan.text_to_video(str(folder / part))
    clip = VideoClip("a", 9, 704, 1280, 8)
    assert model.geometry.latent_shape(clip) == (48, 3, 44, 80)
    assert model.geometry.tokens(clip) == 3 * 22 * 40
    assert (model.geometry.multiple, model.levels) == (32, levels)
    drawn = [model.sample(clip, torch.Generator().manual_seed(seed))[0]["timestep"] for seed in range(16)]
    assert all(1000 * levels[0] <= float(t) <= 1000 * levels[1] for t in drawn)  # type: ignore[arg-type]


def test_a_folder_without_a_pipeline_has_the_usual_strides(folder: Path) -> None:
    from arachnec.models.diffusers import wan

    (folder / "model_index.json").unlink()
    model = wan.text_to_video(str(folder / "transformer_2"))
    assert (model.stride, model.levels) == ((4, 8, 8), (0.0, 1.0))


@pytest.mark.parametrize(
    "timesteps",
    [Timesteps(), Timesteps(shift=5.0), Timesteps(sampling="logit-normal", mean=0.3, std=0.7, shift=3.0)],
)
def test_bounds_take_the_levels_between_them_as_they_would_be_drawn(timesteps: Timesteps) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([draw_time(timesteps, 1, generator) for _ in range(4000)])
    bounded = torch.cat([draw_time(timesteps, 1, generator, (0.3, 0.875)) for _ in range(4000)])
    assert bounded.min() >= 0.3 and bounded.max() <= 0.875
    at = torch.linspace(0.1, 0.9, 9)
    expected = torch.quantile(drawn[(drawn >= 0.3) & (drawn <= 0.875)], at)
    assert (torch.quantile(bounded, at) - expected).abs().max() < 0.03


def test_options_come_before_the_model_s_own_levels() -> None:
    generator = torch.Generator().manual_seed(0)
    assert draw_time(Timesteps(min=0.95), 1, generator, (0.0, 0.5)) >= 0.95


@pytest.mark.parametrize(("least", "most"), [(-0.1, None), (1.0, None), (0.5, 0.5), (None, 1.5), (None, 0.0)])
def test_bounds_that_are_no_range_are_refused(least: float | None, most: float | None) -> None:
    with pytest.raises(UserError, match=r"timesteps\.m"):
        verified(Training(timesteps=Timesteps(min=least, max=most)))


def test_encoders_are_those_of_the_pipeline_around_a_part(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert encoder_folder(folder, "vae") == encoder_folder(folder / "transformer_2", "vae") == folder / "vae"
    assert encoder_folder(folder / "transformer_2", "text") == folder / "text_encoder"
    alone, encoder = tmp_path_factory.mktemp("transformer"), nn.Linear(1, 1)
    assert not encoder_folder(alone, "vae", encoder).is_dir()
    setattr(encoder, PIPELINE, folder)
    assert encoder_folder(alone, "vae", encoder) == folder / "vae"
