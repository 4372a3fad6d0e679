"""An optimizer dealt out over ranks updates as one that lies whole on each, and its checkpoints are interchangeable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from arachnec.backends.torch_distributed import checkpoint
from arachnec.backends.torch_distributed.optimizer import Optimizer, owners
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.training_run import Trainer
from arachnec.executable.folder import read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.values import Quantity
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import MODEL, Work, clip, lowered, traced
from tests.distributed.harness import run_ranks

TRAINING = Training(lr=1e-2, clip_norm=0.5, ema=0.9)


def network(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 5)).to(dtype)


def stepped(
    sharded: bool, dtype: torch.dtype, steps: tuple[int, ...], folder: Path | None, resume: bool
) -> dict[str, Tensor]:
    module = network(dtype)
    parameters = dict(module.named_parameters())
    optimizer = Optimizer(parameters, TRAINING, sharded=sharded)
    if resume and folder is not None:
        checkpoint.load(folder, optimizer.tensors(), "model")
        optimizer.round_parameters()
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        for value in parameters.values():
            value.grad = torch.randn(value.shape, generator=generator).to(dtype)
        optimizer.step()
    if folder is not None and not resume:
        checkpoint.save(folder, optimizer.tensors(), checkpoint.Position(len(steps), 0, "model"))
    return {name: value.detach().clone() for name, value in parameters.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_rank_ends_with_the_parameters_of_the_whole_optimizer(dtype: torch.dtype) -> None:
    whole = run_ranks(1, stepped, False, dtype, (1, 2, 3), None, False)[0]
    for rank in run_ranks(3, stepped, True, dtype, (1, 2, 3), None, False):
        for name, value in rank.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_of_three_ranks_resumes_on_another_number(ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(1, stepped, False, torch.bfloat16, (1, 2, 3, 4), None, False)[0]
    run_ranks(3, stepped, True, torch.bfloat16, (1, 2), tmp_path, False)
    for rank in run_ranks(ranks, stepped, ranks > 1, torch.bfloat16, (3, 4), tmp_path, True):
        for name, value in rank.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=0)


def test_no_rank_owns_more_than_its_share_and_the_largest_parameter() -> None:
    parameters = {str(i): torch.empty(size) for i, size in enumerate((50, 1, 30, 30, 9, 9, 20, 2))}
    found = owners(parameters, 3)
    loads = [sum(parameters[name].numel() for name, rank in found.items() if rank == r) for r in range(3)]
    assert set(found) == set(parameters)
    assert max(loads) <= sum(loads) / 3 + 50


def parameters_updated_here(folder: Path) -> set[str]:
    trainer = Trainer(read_executable(folder), RunOptions(), torch.device("cpu"))
    trainer.step(0)
    held = {name.removeprefix("exp_avg/") for name in trainer._state() if name.startswith("exp_avg/")}
    trainer.close()
    return held


def test_the_plan_of_the_ranks_that_run_decides_and_not_the_executables(tmp_path: Path) -> None:
    clips = [clip("a", 3), clip("b", 5)]
    alone = traced(1, [clips])
    crowded = {"state": Quantity(2.5, "GiB"), "optimizer": Quantity(2.0, "GiB")}
    alone = replace(alone, stages=tuple(replace(s, attrs=s.attrs.updated(**crowded)) for s in alone.stages))
    (tmp_path / "source.py").write_text(MODEL)
    write_executable(
        tmp_path,
        program=lowered(alone, [Work((0,), (0,), 0.0), Work((1,), (0,), 1.0)]),
        traced=alone,
        pipeline="default",
        model_file=load_model_file(tmp_path / "source.py"),
        clips=clips,
        training=None,
    )
    (whole,) = run_ranks(1, parameters_updated_here, tmp_path)
    first, second = run_ranks(2, parameters_updated_here, tmp_path)
    assert first | second == whole and not first & second and first and second
