"""What is drawn for a clip: the noise level as the options say, and steps without its caption."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arachnec.backends.cascade_step import in_step
from arachnec.data.clip import Timesteps, VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.models.diffusers import common
from arachnec.models.file import load_model_file
from arachnec.tracing.sample_reads import demand_timesteps_read
from tests.commands.small_model import MODEL

CLIP = VideoClip("a", 9, 32, 48, 8, caption="a red kite")


def times(timesteps: Timesteps, tokens: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat([common.draw_time(timesteps, tokens, generator) for _ in range(4000)])


def test_uniform_times_are_those_that_the_generator_gives() -> None:
    assert torch.equal(times(Timesteps())[:1], torch.rand(1, generator=torch.Generator().manual_seed(0)))


def test_logit_normal_times_have_its_mean_and_spread_on_the_logit_scale() -> None:
    logits = torch.logit(times(Timesteps("logit-normal", mean=0.5, std=0.8)))
    assert float(logits.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(logits.std()) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("sampling", ["uniform", "logit-normal"])
def test_a_shift_adds_its_logarithm_on_the_logit_scale_and_grows_with_the_clip(sampling: str) -> None:
    plain = times(Timesteps(sampling))  # type: ignore[arg-type]
    shifted = times(Timesteps(sampling, shift=3.0))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.logit(shifted), torch.logit(plain) + math.log(3.0), rtol=1e-3, atol=1e-3)
    larger = Timesteps(sampling, shift=1.5, base_tokens=1000)  # type: ignore[arg-type]
    torch.testing.assert_close(times(larger, 4000), shifted)


def test_captions_are_dropped_at_their_rate_and_as_seed_step_and_clip_say() -> None:
    training = Training(caption_dropout=0.25)
    steps = [in_step(training, CLIP, step).caption for step in range(2000)]
    assert set(steps) == {"", CLIP.caption}
    assert steps.count("") / len(steps) == pytest.approx(0.25, abs=0.03)
    assert steps == [in_step(training, CLIP, step).caption for step in range(2000)]
    other = [in_step(training, replace(CLIP, id="b"), step).caption for step in range(2000)]
    assert steps != other
    assert in_step(training, CLIP, steps.index("")).text_tokens == CLIP.text_tokens, "as it was planned"
    assert in_step(Training(), CLIP, steps.index("")) == CLIP


def test_a_sample_that_does_not_read_the_timesteps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    shifted = Timesteps(shift=3.0)
    path.write_text(MODEL)
    unread = load_model_file(path)
    demand_timesteps_read(unread, Timesteps(), CLIP, {}, None)
    with pytest.raises(UserError, match="`sample` does not read them"):
        demand_timesteps_read(unread, shifted, CLIP, {}, unread.span("sample"))
    path.write_text(MODEL.replace("    return {", "    x = x * clip.timesteps.shift\n    return {"))
    demand_timesteps_read(load_model_file(path), shifted, CLIP, {}, None)


@pytest.mark.parametrize("family", ["wan", "hunyuan_video", "cogvideox"])
def test_the_adapters_draw_by_the_clips_timesteps(family: str) -> None:
    module = pytest.importorskip(f"arachnec.models.diffusers.{family}")
    pytest.importorskip("diffusers")
    adapter = module.text_to_video(num_layers=1)
    always = replace(CLIP, timesteps=Timesteps(shift=1e6))
    drawn, _ = adapter.sample(always, torch.Generator().manual_seed(0))
    assert float(drawn["timestep"][0]) > 990
    plain, _ = adapter.sample(CLIP, torch.Generator().manual_seed(0))
    assert float(plain["timestep"][0]) < 990


def test_of_several_captions_each_step_draws_one_as_seed_step_and_clip_say() -> None:
    several = replace(CLIP, captions=("a red kite", "a kite", ""))
    steps = [in_step(Training(), several, step).caption for step in range(600)]
    assert steps == [in_step(Training(), several, step).caption for step in range(600)]
    assert all(150 < steps.count(caption) < 250 for caption in several.captions)
    assert steps != [in_step(Training(), replace(several, id="b"), step).caption for step in range(600)]
    dropped = [
        in_step(Training(caption_dropout=0.5), replace(CLIP, captions=("a", "b")), n).caption for n in range(400)
    ]
    assert set(dropped) == {"", "a", "b"} and 150 < dropped.count("") < 250
