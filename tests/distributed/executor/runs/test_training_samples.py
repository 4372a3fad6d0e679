"""Latents that are sampled beside training are those of the trained model, and training goes on as without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arachnec.driver import compile as compile_model
from arachnec.executable.folder import HEADER
from arachnec.executable.train_file import training_of
from arachnec.executable.training_options import SampledRequests, Training
from arachnec.ir.diagnostic import UserError
from arachnec.sampling.during_training import TrainingSamples
from tests.distributed import pipeline_cases
from tests.distributed.executor.cells import test_cells
from tests.distributed.executor.runs.test_validation import CLIPS, TRAINING, TWO, cells, trained_for_a_step, whole
from tests.distributed.executor.stages import test_pipelines
from tests.distributed.executor_cases import train_on
from tests.slow import quick

SAMPLER = """
import torch


class Halves:  # x moves by the prediction over the number of steps
    def set_timesteps(self, steps):
        self.timesteps = torch.linspace(1, 0, steps)

    def step(self, prediction, timestep, latents):
        return latents - prediction / len(self.timesteps)


def models():
    return {"tiny": lambda: torch.nn.Linear(1, 1)}  # the trained model stands for it


def scheduler():
    return Halves()


def start(request, generator):
    return torch.randn(1, request.frames * 4, 4, generator=generator)


def arguments(name, latents, timestep, request, conditional):
    return {"x": latents, "time": timestep[None]}
"""
REQUESTS = [
    {"id": name, "frames": 2, "height": 16, "width": 16, "text_tokens": 0, "steps": 3, "seed": 7} for name in "abc"
]


def options(folder: Path, every: int = 1) -> SampledRequests:
    sampler, requests = folder / "sampler.py", folder / "requests.jsonl"
    sampler.write_text(SAMPLER)
    requests.write_text("".join(json.dumps(row) + "\n" for row in REQUESTS))
    return SampledRequests(str(sampler), str(requests), every)


def test_they_are_of_the_trained_model_and_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    folder = whole(tmp_path / "x", 2, TWO)
    alone = train_on(2, folder, steps=2)["steps"]
    validated_steps = train_on(2, with_samples(folder, options(tmp_path)), steps=2)["steps"]
    assert [step["loss"] for step in validated_steps] == [step["loss"] for step in alone]
    assert [step["gradient_norm"] for step in validated_steps] == [step["gradient_norm"] for step in alone]
    expected = sampled_plainly(trained_for_a_step(folder, CLIPS))
    for name in "abc":
        first = load_file(folder / "samples" / "step-1" / f"{name}.safetensors")["latents"]
        torch.testing.assert_close(first, expected)
        later = load_file(folder / "samples" / "step-2" / f"{name}.safetensors")["latents"]
        assert not torch.equal(first, later)


def test_members_of_a_cell_gather_for_each_other_and_one_without_requests_does_too(tmp_path: Path) -> None:
    """Three requests on four ranks in two cells: rank 3 has none, and rank 2's are longer than all of rank 3's."""
    alone = train_on(4, cells(tmp_path / "x"), steps=2)["steps"]
    folder = with_samples(cells(tmp_path / "y"), options(tmp_path))
    sampled = train_on(4, folder, steps=2)["steps"]
    assert [step["loss"] for step in sampled] == [step["loss"] for step in alone]
    expected = sampled_plainly(trained_for_a_step(folder, test_cells.CLIPS))
    for name in "abc":
        first = load_file(folder / "samples" / "step-1" / f"{name}.safetensors")["latents"]
        torch.testing.assert_close(first.float(), expected.float())


STAGED = {  # name: ranks, the passes' stages, schedule, cell, and what lies in host memory
    "two stages": (2, "p=2", "schedule=1f1b", 1, "none"),
    "there and back on two ranks": (2, "p=4", "schedule=zb-v", 1, "none"),
    "one rank, then two, and one is idle": (4, "cuts=[1],replicas=[1,2]", "schedule=dapple", 1, "none"),
    "two stages in cells of two": (4, "p=2", "schedule=zb-h1", 2, "none"),
    "layers in host memory": (2, "p=2", "schedule=1f1b", 1, "parameters"),
}


@pytest.mark.parametrize("case", quick(list(STAGED), "there and back on two ranks", "layers in host memory"))
def test_a_rank_of_every_stage_samples_with_the_others(case: str, tmp_path: Path) -> None:
    ranks, stages, schedule, cell, host = STAGED[case]

    def built(name: str) -> Path:
        passes = pipeline_cases.pipeline_of(stages, schedule, cell=cell, host=host)
        clips = [test_pipelines.CLIPS]
        return pipeline_cases.executable(tmp_path / name, ranks, clips, passes, encoder=True, training=TRAINING)

    alone = train_on(ranks, built("x"), steps=2)["steps"]
    folder = with_samples(built("y"), options(tmp_path))
    sampled = train_on(ranks, folder, steps=2)["steps"]
    assert [step["loss"] for step in sampled] == [step["loss"] for step in alone]
    assert [step["gradient_norm"] for step in sampled] == [step["gradient_norm"] for step in alone]
    expected = sampled_plainly(trained_for_a_step(folder, test_pipelines.CLIPS))
    for name in "abc":
        first = load_file(folder / "samples" / "step-1" / f"{name}.safetensors")["latents"]
        torch.testing.assert_close(first.float(), expected.float())


def with_samples(folder: Path, asked: SampledRequests) -> Path:
    header = json.loads((folder / HEADER).read_text())
    header["training"]["sampling"] = {"file": asked.file, "requests": asked.requests, "every": 1}
    (folder / HEADER).write_text(json.dumps(header))
    return folder


def sampled_plainly(model: torch.nn.Module) -> torch.Tensor:
    """The requests' latents by a loop over the model's forward."""
    dtype = next(model.parameters()).dtype
    latents = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        for time in torch.linspace(1, 0, 3):
            latents = latents - model(latents.to(dtype), time[None].to(dtype)) / 3
    return latents


def test_a_model_whose_weights_change_precision_is_given_its_own(tmp_path: Path) -> None:
    samples = TrainingSamples.of(options(tmp_path), torch.device("cpu"), 0, 1)
    assert samples is not None
    model = _Halving().bfloat16().train()
    assert samples.write(model, tmp_path / "out", torch.device("cpu")) == []
    assert model.training and model.seen == {(torch.bfloat16, False)}
    model.weight.data.fill_(torch.nan)
    assert samples.write(model, tmp_path / "none", torch.device("cpu")) == ["a", "b", "c"]
    assert not list((tmp_path / "none").iterdir())


class _Halving(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.seen: set[tuple[torch.dtype, bool]] = set()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        self.seen.add((x.dtype, self.training))
        return x * self.weight


def test_what_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    device = torch.device("cpu")
    options(tmp_path)
    (tmp_path / "sampler.py").write_text(SAMPLER.replace('{"tiny":', '{"other": torch.nn.Linear(1, 1), "tiny":'))
    two = SampledRequests(str(tmp_path / "sampler.py"), str(tmp_path / "requests.jsonl"))
    with pytest.raises(UserError, match=r"it has the models other, tiny, and one is trained"):
        TrainingSamples.of(two, device, 0, 1)
    (tmp_path / "clips.jsonl").write_text('{"frames": 9, "height": 16, "width": 16, "text_tokens": 0}\n')
    (tmp_path / "model.py").write_text(
        "def build(): ...\ndef sample(clip, generator): ...\ndef loss(prediction, target): ...\n"
    )
    with pytest.raises(UserError, match=r"it has the models other, tiny, and one is trained"):
        compile_model(tmp_path / "model.py", tmp_path / "clips.jsonl", "1:cpu", training=Training(sampling=two))
    with pytest.raises(UserError, match=r"`sampling.requests` is None: one needs the other"):
        training_of(Training(), settings=["sampling.file=x.py"])
    with pytest.raises(UserError, match=r"sampling.every = 0"):
        training_of(Training(), settings=["sampling.every=0"])
