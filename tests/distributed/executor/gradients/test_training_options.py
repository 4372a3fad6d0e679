"""Training with other options than the default: what ranks train is what a plain loop of PyTorch trains, over a
checkpoint and another number of ranks too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from arachnec.backends.torch_distributed.plans.step_plans import demand_room, state_beyond_plan
from arachnec.checkpoint.folder import Position, committed
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Group, Schedule, TorchClass, Training
from arachnec.ir.diagnostic import UserError
from arachnec.model_state.optimizer import Optimizer, global_norm, norm_over
from arachnec.models.file import load_model_file
from tests.distributed import whole_checkpoints
from tests.distributed.executor.cells import test_cells
from tests.distributed.executor_cases import (
    DOUBLE,
    Work,
    assert_same_gradients,
    clip,
    executable,
    plain_loop,
    train_on,
)
from tests.distributed.harness import run_ranks
from tests.slow import slow

CLIPS = (clip("a", 3), clip("b", 5), clip("c", 2))
ONE = [Work((0,), (0,), 0.0), Work((1,), (0,), 1.0), Work((2,), (0,), 2.0)]
TWO = [Work((0,), (1,), 0.0), Work((1,), (0, 1), 1.0), Work((2,), (0,), 0.0)]
TRAINING = Training(
    lr=0.05,
    clip_norm=0.1,
    optimizer=TorchClass("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    groups=(Group(match=("*norm*", "*bias"), arguments={"weight_decay": 0.0, "lr": 0.02}),),
    schedule=Schedule(2, TorchClass("CosineAnnealingLR", {"T_max": 5})),
)


def plain(folder: Path, clips: Sequence[VideoClip], steps: int) -> dict[str, Tensor]:
    """``TRAINING`` as a loop of PyTorch."""
    model_file = load_model_file(folder / "model.py")
    torch.manual_seed(0)
    model = model_file.build()
    own = dict(model.named_parameters())
    light = [value for name, value in own.items() if "norm" in name or name.endswith("bias")]
    rest = [value for value in own.values() if not any(value is other for other in light)]
    optimizer = torch.optim.SGD(
        [{"params": light, "weight_decay": 0.0, "lr": 0.02}, {"params": rest}],
        lr=0.05,
        momentum=0.9,
        weight_decay=0.1,
    )
    schedulers = torch.optim.lr_scheduler
    rising = schedulers.LinearLR(optimizer, start_factor=1 / 2, total_iters=1)
    for step in range(steps):
        optimizer.zero_grad()
        _, gradients = plain_loop(folder, clips, step=step, model=model)
        used = [value for value in own.values() if value.grad is not None]
        torch.nn.utils.clip_grad_norm_(used, 0.1)
        assert gradients
        optimizer.step()
        if step < 1:
            rising.step()
        elif step == 1:
            falling = schedulers.CosineAnnealingLR(optimizer, 5)
        else:
            falling.step()
    return {name: value.detach() for name, value in own.items()}


def masters(folder: Path) -> dict[str, Tensor]:
    """The weights in the newest checkpoint."""
    files = committed(folder)[0].glob("*.safetensors")
    return {
        name.removeprefix("master/"): value
        for file in files
        for name, value in load_file(file).items()
        if name.startswith("master/")
    }


def test_ranks_train_as_a_plain_loop_does_over_a_checkpoint_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    two, one = (
        executable(tmp_path / str(n), [CLIPS], works, n, training=TRAINING, more=DOUBLE)
        for n, works in ((2, TWO), (1, ONE))
    )
    kept = tmp_path / "kept"
    train_on(2, two, steps=3, checkpoint=kept)
    train_on(1, one, more=2, checkpoint=kept, resume=True)
    expected = plain(two, CLIPS, 5)
    trained = masters(kept)
    assert set(trained) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(trained[name].view(value.shape), value, rtol=1e-9, atol=1e-12)


def stepped(training: Training, sharded: bool, steps: Sequence[int], folder: Path | None, resume: bool) -> Any:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1))
    parameters = dict(module.named_parameters())
    optimizer = Optimizer(parameters, training, sharded=sharded)
    if resume and folder is not None:
        assert whole_checkpoints.load(folder, optimizer.tensors(), Position(2, 0, "model")) is not None
        optimizer.round_parameters()
        optimizer.done = 2
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        for value in parameters.values():
            value.grad = torch.randn(value.shape, generator=generator)
        optimizer.step(norm=norm_over(None, global_norm(optimizer.gradients())) if sharded else None)
        for coming in optimizer.gathered(parameters) if sharded else ():
            coming.wait()
    if folder is not None and not resume:
        whole_checkpoints.save(folder, optimizer.tensors(), Position(2, 0, "model"))
    return {name: value.detach().clone() for name, value in parameters.items()}


@pytest.mark.parametrize(("name", "sharded"), [("NAdam", True), ("SGD", True), ("Adafactor", False)])
def test_state_of_three_ranks_resumes_on_two(name: str, sharded: bool, tmp_path: Path) -> None:
    """Scalars that are no step, a state without a step, and one that is no cut of a parameter."""
    training = msgspec.structs.replace(TRAINING, groups=(), optimizer=TorchClass(name, {}))
    whole = stepped(training, False, (1, 2, 3, 4), None, False)
    run_ranks(3, stepped, training, sharded, (1, 2), tmp_path, False)
    for rank in run_ranks(2, stepped, training, sharded, (3, 4), tmp_path, True):
        for key, value in rank.items():
            torch.testing.assert_close(value, whole[key], rtol=1e-5, atol=1e-6)


def test_options_that_take_more_memory_than_was_proved_are_held_to_what_is_left(tmp_path: Path) -> None:
    compiled = read_executable(executable(tmp_path, [CLIPS], TWO, 2))
    model_file = compiled.model_file()
    trained = sum(value.numel() for value in model_file.build().parameters() if value.requires_grad)
    averaged = msgspec.structs.replace(compiled.training, ema=0.9)
    assert state_beyond_plan(compiled, model_file, compiled.training) == 0
    assert state_beyond_plan(compiled, model_file, averaged) == pytest.approx(4 * trained / 2**30)
    lighter = msgspec.structs.replace(compiled.training, optimizer=TorchClass("SGD"))
    assert state_beyond_plan(compiled, model_file, lighter) == 0
    demand_room(compiled.program, 3.9)  # of 4 GiB
    with pytest.raises(UserError, match="more than was proved"):
        demand_room(compiled.program, 4.0)


@pytest.mark.parametrize(
    ("cell", "dealt_out"),
    [slow(1, False), (1, True), slow(2, False), (2, True)],
    ids=["whole", "sharded", "cells", "both"],
)
def test_an_update_of_several_batches_has_the_gradient_of_all_their_clips(
    cell: int, dealt_out: bool, tmp_path: Path
) -> None:
    training = msgspec.structs.replace(TRAINING, groups=(), schedule=Schedule(), accumulate=2)
    folder = test_cells.executable(tmp_path, test_cells.BOTH, 4, cell, training=training, dealt_out=dealt_out)
    saved = tmp_path / "g.safetensors"
    reports = train_on(4, folder, steps=2, save_gradients=saved)["steps"]
    model_file = load_model_file(folder / "model.py")
    torch.manual_seed(0)
    model = model_file.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for step, told in enumerate(reports):
        optimizer.zero_grad()
        drawn = [plain_loop(folder, test_cells.CLIPS, step=number, model=model) for number in (2 * step, 2 * step + 1)]
        assert told["loss"] == pytest.approx(sum(loss for loss, _ in drawn) / 2, rel=1e-9)
        gradients = {name: value.clone() / 2 for name, value in drawn[-1][1].items()}  # both are in it
        for name, value in model.named_parameters():
            value.grad = gradients[name].clone() if value.grad is not None else None
        used = [value for value in model.parameters() if value.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(used, 0.1)
        assert told["gradient_norm"] == pytest.approx(float(norm), rel=1e-6)
        optimizer.step()
    assert [told["step"] for told in reports] == [0, 1]
    rounding = 1e-9 if cell == 1 and not dealt_out else 1e-6  # a norm over ranks, and sums that are dealt out, are fp32
    assert_same_gradients(saved, gradients, rounding)


def test_batches_of_unequal_size_count_by_their_clips(tmp_path: Path) -> None:
    training = Training(accumulate=2)
    first, second = CLIPS[:2], CLIPS[2:]
    works = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]
    folder = executable(tmp_path, [first, second], works, 2, training=training, pipeline="data-parallel", more=DOUBLE)
    saved = tmp_path / "g.safetensors"
    (told,) = train_on(2, folder, save_gradients=saved)["steps"]
    loss = 0.0
    gradients: dict[str, Tensor] = {}
    for step, clips in enumerate((first, second)):
        own, given = plain_loop(folder, clips, step=step)
        loss += own * len(clips) / 3
        gradients = {
            name: gradients.get(name, torch.zeros(())) + value * (len(clips) / 3) for name, value in given.items()
        }
    assert told["loss"] == pytest.approx(loss, rel=1e-9)
    assert_same_gradients(saved, gradients, 1e-9)
