"""The reference: what it refuses, and that a plan changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from arachnec.backends.reference import run_reference
from arachnec.executable.folder import read_executable
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Phase
from tests.distributed.executor_cases import Work, clip, executable

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5))


def test_equal_clips_batched_or_not_have_the_same_gradients(tmp_path: Path) -> None:
    outcomes = []
    for name, works in {
        "batched": [Work((0, 1), (0,), 0.0), Work((2,), (0,), 1.0)],
        "alone": [Work((2,), (0,), 0.0), Work((1,), (0,), 1.0), Work((0,), (0,), 2.0)],
    }.items():
        read = read_executable(executable(tmp_path / name, [CLIPS], works, 1))
        outcomes.append(run_reference(read.program, read.model_file(), dict(enumerate(read.clips))))
    first, second = outcomes
    assert abs(first.loss - second.loss) <= 1e-6 * abs(first.loss)
    for name, value in first.gradients.items():
        torch.testing.assert_close(second.gradients[name], value, rtol=1e-4, atol=1e-6)


def test_other_steps_and_seeds_draw_other_noise(tmp_path: Path) -> None:
    read = read_executable(executable(tmp_path, [CLIPS], [Work((i,), (0,), float(i)) for i in range(3)], 1))
    clips = dict(enumerate(read.clips))
    model = read.model_file().build()
    seeds = [msgspec.structs.replace(read.training, seed=seed) for seed in (0, 0, 1)]
    losses = [
        run_reference(read.program, read.model_file(), clips, training, step=step, model=model).loss
        for training, step in zip(seeds, (0, 1, 0), strict=True)
    ]
    assert len(set(losses)) == 3


def test_a_module_without_cascades_is_refused(tmp_path: Path) -> None:
    read = read_executable(executable(tmp_path, [CLIPS], [Work((i,), (0,), float(i)) for i in range(3)], 1))
    with pytest.raises(UserError, match="no cascades to run"):
        run_reference(read.traced, read.model_file(), dict(enumerate(read.clips)))


def test_phases_other_than_training_are_refused(tmp_path: Path) -> None:
    read = read_executable(executable(tmp_path, [CLIPS], [Work((i,), (0,), float(i)) for i in range(3)], 1))
    sampling = tuple(replace(cascade, phase=Phase.DENOISE) for cascade in read.program.cascades)
    with pytest.raises(UserError, match="denoise"):
        run_reference(replace(read.program, cascades=sampling), read.model_file(), dict(enumerate(read.clips)))
