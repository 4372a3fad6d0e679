"""The loss of a validation manifest is that of a plain loop, in every layout, and training goes on as without it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.executable.folder import HEADER, VALIDATION, read_executable
from arachnec.executable.other_manifests import STEP, demand_same_manifests, validation_text
from arachnec.executable.training_options import TorchClass, Training
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import load_model_file
from tests.distributed import pipeline_cases
from tests.distributed.executor.cells import test_cells
from tests.distributed.executor.stages import test_pipelines
from tests.distributed.executor_cases import Work, clip, executable, plain_loop, train_on

CLIPS = (clip("a", 3), clip("b", 5), clip("c", 2))
HELD_BACK = tuple(clip(f"held {c.id}", c.frames) for c in CLIPS)
ONE = [Work((0,), (0,), 0.0), Work((1,), (0,), 1.0), Work((2,), (0,), 2.0)]
TWO = [Work((0,), (1,), 0.0), Work((1,), (0, 1), 1.0), Work((2,), (0,), 0.0)]
READS_CAPTIONS = """

drawn = sample


def sample(clip, generator):
    given, target = drawn(clip, generator)
    return given, target + len(clip.caption or "")
"""
# Training drops every caption, validation none.
TRAINING = Training(lr=0.05, optimizer=TorchClass("SGD", {"momentum": 0.9}), caption_dropout=1.0)


def validated(folder: Path, clips: Sequence[VideoClip], every: int = 1, **changed: Any) -> Path:
    """An executable with a validation manifest of these clips, whose shapes it trains."""
    read = read_executable(folder)
    tokens = {(c.frames, c.height, c.width, c.text): c.tokens for c in read.traced.clips}
    text = validation_text([clips], lambda c: tokens[c.shape])
    (folder / VALIDATION).write_text(text)
    header = json.loads((folder / HEADER).read_text())
    header["fingerprint"][VALIDATION] = hashlib.sha256(text.encode()).hexdigest()
    header["training"] |= {"validation": {"data": "held.jsonl", "every": every}, **changed}
    (folder / HEADER).write_text(json.dumps(header))
    return folder


def whole(folder: Path, ranks: int, works: Sequence[Work]) -> Path:
    return executable(folder, [CLIPS], works, ranks, training=TRAINING, more=READS_CAPTIONS)


def cells(folder: Path) -> Path:
    return test_cells.executable(folder, test_cells.BOTH, 4, 2, training=TRAINING, dealt_out=True)


def stages(folder: Path) -> Path:
    passes = pipeline_cases.pipeline_of("p=2", "schedule=1f1b")
    return pipeline_cases.executable(folder, 2, [test_pipelines.CLIPS], passes, encoder=True, training=TRAINING)


CASES: dict[str, tuple[int, Callable[[Path], Path], Sequence[VideoClip]]] = {
    "two ranks": (2, lambda folder: whole(folder, 2, TWO), CLIPS),
    "cells, the optimizer dealt out": (4, cells, test_cells.CLIPS),
    "stages": (2, stages, test_pipelines.CLIPS),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_a_plain_loop_and_training_is_the_same_to_the_bit(case: str, tmp_path: Path) -> None:
    ranks, build, clips = CASES[case]
    folder = build(tmp_path)
    alone = train_on(ranks, folder, steps=2)["steps"]
    held = [_held(c) for c in clips]
    validated_steps = train_on(ranks, validated(folder, held), steps=2)["steps"]
    assert [step["loss"] for step in validated_steps] == [step["loss"] for step in alone]
    assert [step["gradient_norm"] for step in validated_steps] == [step["gradient_norm"] for step in alone]
    assert all(step["validation_loss"] is None for step in alone)
    loss, _ = plain_loop(folder, held, step=STEP, model=trained_for_a_step(folder, clips))
    assert validated_steps[0]["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert validated_steps[0]["validation_loss"] != validated_steps[1]["validation_loss"]


def trained_for_a_step(folder: Path, clips: Sequence[VideoClip]) -> nn.Module:
    """The model as plain PyTorch has it behind one step."""
    torch.manual_seed(0)
    model: nn.Module = load_model_file(folder / "model.py").build()
    plain_loop(folder, clips, model=model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), TRAINING.clip_norm)
    torch.optim.SGD(model.parameters(), TRAINING.lr, momentum=0.9).step()
    return model


def _held(c: VideoClip) -> VideoClip:
    return VideoClip(f"held {c.id}", *c.shape, caption="a word")


def test_it_is_told_every_so_many_steps_as_other_metrics_are(tmp_path: Path) -> None:
    folder = validated(whole(tmp_path / "x", 2, TWO), HELD_BACK, every=2, logging={"jsonl": str(tmp_path / "log")})
    steps = train_on(2, folder, steps=4)["steps"]
    assert [step["step"] for step in steps if step["validation_loss"] is not None] == [1, 3]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line.get("validation_loss") for line in lines] == [step["validation_loss"] for step in steps]


def test_what_the_model_remembers_and_draws_is_put_back() -> None:
    from arachnec.backends.torch_distributed.run.validation import undisturbed

    model = torch.nn.BatchNorm1d(3)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with undisturbed(model, torch.device("cpu")):
        model(torch.randn(4, 3))
        assert not torch.equal(model.running_mean, state["running_mean"])  # type: ignore[arg-type]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_another_manifest_than_was_compiled_is_refused(tmp_path: Path) -> None:
    read = read_executable(validated(whole(tmp_path, 1, ONE), HELD_BACK))
    demand_same_manifests(read, read.training)
    with pytest.raises(UserError, match=r"`validation.data` is None: it was compiled with 'held.jsonl'"):
        demand_same_manifests(read, TRAINING)
