"""An optimizer dealt out over ranks updates as one that lies whole on each, and its checkpoints are interchangeable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.checkpoint.folder import Position
from arachnec.checkpoint.parts import part_of
from arachnec.executable.folder import read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.values import Quantity
from arachnec.model_state.gradients import ScatteredPiece
from arachnec.model_state.optimizer import Optimizer, global_norm, norm_over
from arachnec.model_state.parameter_parts import Parts
from arachnec.models.file import load_model_file
from tests.distributed import whole_checkpoints
from tests.distributed.executor_cases import MODEL, Work, clip, lowered, traced
from tests.distributed.harness import run_ranks
from tests.distributed.rank_device import rank_device

POSITION = Position(2, 0, "model")
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
        assert whole_checkpoints.load(folder, optimizer.tensors(), POSITION) is not None
        optimizer.round_parameters()
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        for value in parameters.values():
            value.grad = torch.randn(value.shape, generator=generator).to(dtype)
        optimizer.step(norm=norm_over(None, global_norm(optimizer.gradients())) if sharded else None)
        for coming in optimizer.gathered(parameters) if sharded else ():
            coming.wait()
    if folder is not None and not resume:
        whole_checkpoints.save(folder, optimizer.tensors(), POSITION)
    return {name: value.detach().clone() for name, value in parameters.items()}


def close(ours: Tensor, whole: Tensor) -> None:
    """To the rounding of the global norm, whose parts are added up in another order."""
    torch.testing.assert_close(ours, whole, rtol=1e-6 if ours.dtype is torch.float32 else 2**-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_rank_ends_with_the_parameters_of_the_whole_optimizer(dtype: torch.dtype) -> None:
    whole = run_ranks(1, stepped, False, dtype, (1, 2, 3), None, False)[0]
    first, *others = run_ranks(3, stepped, True, dtype, (1, 2, 3), None, False)
    for name, value in first.items():
        close(value, whole[name])
        for other in others:
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_checkpoint_of_three_ranks_resumes_on_another_number(ranks: int, tmp_path: Path) -> None:
    whole = run_ranks(1, stepped, False, torch.bfloat16, (1, 2, 3, 4), None, False)[0]
    run_ranks(3, stepped, True, torch.bfloat16, (1, 2), tmp_path, False)
    for rank in run_ranks(ranks, stepped, ranks > 1, torch.bfloat16, (3, 4), tmp_path, True):
        for name, value in rank.items():
            close(value, whole[name])


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_parts_are_equal_but_for_the_last_and_make_up_the_whole(ranks: int) -> None:
    values = [torch.randn(5, 2), torch.randn(()), torch.randn(4, 3).t(), torch.randn(0), torch.randn(ranks * 2)]
    cuts = [Parts(ranks, rank) for rank in range(ranks)]
    rows = cuts[0].packed(values)
    gathered = [torch.full_like(value, -1.0) for value in values]
    cuts[0].unpack(rows, gathered)
    for number, value in enumerate(values):
        torch.testing.assert_close(gathered[number], value, rtol=0, atol=0)
        own = [cut.own(value) for cut in cuts]
        torch.testing.assert_close(torch.cat(own), value.reshape(-1), rtol=0, atol=0)
        assert max(map(len, own)) == -(-value.numel() // ranks)
        for cut, part in zip(cuts, own, strict=True):
            torch.testing.assert_close(cut.cut(rows[cut.rank], values)[number], part, rtol=0, atol=0)


def scattered(dtype: torch.dtype) -> list[list[float]]:
    """This rank's parts of three gradients, the second of which it does not have."""
    values = [nn.Parameter(torch.zeros(count, dtype=dtype)) for count in (7, 2, 1)]
    rank = dist.get_rank()
    values[0].grad = torch.arange(7).to(dtype) + 2**-6 * rank
    values[2].grad = torch.full((1,), 1.0 + rank, dtype=dtype)
    assert dist.group.WORLD is not None
    parts = ScatteredPiece.sent(values, dist.group.WORLD).finish()
    assert all(value.grad is None for value in values) and all(part.dtype is torch.float32 for part in parts)
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_gets_its_parts_of_the_sum_which_is_not_rounded(dtype: torch.dtype, ranks: int) -> None:
    given = [(torch.arange(7).to(dtype) + 2**-6 * rank).float() for rank in range(ranks)]
    whole = [torch.stack(given).sum(0), torch.zeros(2), torch.tensor([ranks * (ranks + 1) / 2])]
    for rank, parts in enumerate(run_ranks(ranks, scattered, dtype)):
        assert parts == [Parts(ranks, rank).own(value).tolist() for value in whole]


def norm_where_only_the_first_has_gradients() -> float:
    gradients = {"w": torch.tensor([3.0, 4.0])} if dist.get_rank() == 0 else {}
    return float(norm_over(None, global_norm(gradients)))


def test_a_rank_without_gradients_joins_the_norm_of_all_on_the_device_of_all() -> None:
    assert run_ranks(2, norm_where_only_the_first_has_gradients) == [5.0, 5.0]
    assert global_norm({}, torch.device("meta")).device.type == "meta"


def elements_updated_here(folder: Path) -> dict[str, int]:
    trainer = Trainer(read_executable(folder), RunOptions(), rank_device())
    trainer.step(0)
    parts = {
        name.removeprefix("exp_avg/"): part_of(value).values.numel()
        for name, value in trainer._state().items()
        if name.startswith("exp_avg/")
    }
    trainer.close()
    return parts


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
    (whole,) = run_ranks(1, elements_updated_here, tmp_path)
    first, second = run_ranks(2, elements_updated_here, tmp_path)
    assert {name: first.get(name, 0) + second.get(name, 0) for name in whole} == whole
    assert sum(second.values()) > 0.4 * sum(whole.values())
