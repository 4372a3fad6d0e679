"""Pipelines on gloo ranks: the gradients of plain PyTorch, whatever the schedule and the cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.executor_cases import clip, plain_loop, train_on
from tests.distributed.pipeline_cases import executable, pipeline_of

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2), clip("e", 4))


def assert_exact(found: Path, expected: dict[str, torch.Tensor]) -> None:
    gradients = load_file(found)
    assert set(gradients) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-9, atol=1e-14, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("world", "stages", "schedule"),
    [
        (2, "p=2", "schedule=gpipe"),
        (2, "p=2", "schedule=1f1b"),
        (2, "p=2", "schedule=zb-h1"),
        (2, "p=4", "schedule=interleaved-1f1b"),
        (2, "p=4", "schedule=zb-v"),
        (4, "p=4", "schedule=zb-h1"),
        (4, "cuts=[1]", "schedule=1f1b"),
    ],
)
def test_gradients_are_those_of_plain_pytorch(tmp_path: Path, world: int, stages: str, schedule: str) -> None:
    """Of five clips of four lengths, so replicas have unequal numbers; with encoder, skip and tied parameters."""
    folder = executable(tmp_path, world, [CLIPS], pipeline_of(stages, schedule), encoder=True)
    report = train_on(world, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    loss, expected = plain_loop(folder, CLIPS)
    assert report["steps"][0]["loss"] == pytest.approx(loss, rel=1e-12)
    assert_exact(tmp_path / "g.safetensors", expected)
