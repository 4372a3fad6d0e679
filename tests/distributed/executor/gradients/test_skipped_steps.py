"""A step whose gradient is not finite changes nothing, on all ranks alike, and names the clip and its ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from arachnec.backends.cascade_step import finite_rows, not_finite, poisoning
from arachnec.checkpoint.parts import part_of
from arachnec.executable.training_options import TorchClass, Training
from arachnec.model_state.optimizer import Optimizer, global_norm, norm_over
from tests.distributed.executor_cases import Work, clip, executable, train_on
from tests.distributed.harness import RankError, run_ranks

CLIPS = [clip("a", 3), clip("b", 5), clip("c", 5)]
WORKS = [Work((0,), (0, 1), 0), Work((1, 2), (1,), 1)]
# The second time that it is asked for, which is in step 1, clip c is not finite.
NOT_FINITE = """

def sample(clip, generator, inner=sample, seen=[]):
    kwargs, target = inner(clip, generator)
    seen.append(clip.id)
    if clip.id == "c" and {when}:
        target = target * float("{value}")
    return kwargs, target
"""
ONCE = "seen.count('c') == 2"
ALWAYS = "seen.count('c') > 1"
GRADIENT = """

def loss(prediction, target, inner=loss):
    return inner(prediction, target) + (prediction * 0).sum().sqrt()
"""


def broken(value: str = "nan", when: str = ONCE) -> str:
    return NOT_FINITE.format(value=value, when=when)


def states(folder: Path, steps: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for file in sorted((folder / f"step-{steps:08d}").glob("*.safetensors")):
        state |= {f"{file.name}/{name}": value for name, value in load_file(file).items()}
    return state


def changed(folder: Path, first: int, second: int) -> bool:
    before, after = states(folder, first), states(folder, second)
    assert before.keys() == after.keys() and len(before) > 10
    return any(not torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(Training(lr=1e-2), id="fp32"),
        pytest.param(Training(lr=1e-2, dtype="bf16", ema=0.5, clip_norm=0.0), id="bf16-with-an-average"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_one_does(tmp_path: Path, training: Training) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2, more=broken(), training=training)
    kept = tmp_path / "kept"
    steps = train_on(2, folder, steps=3, checkpoint=kept, every=1, keep=9)["steps"]
    assert [step["skipped"] for step in steps] == [False, True, False]
    assert steps[1]["loss"] is None
    (named,) = steps[1]["not_finite"]  # of a micro-batch with b, which is finite
    assert (named["clip"], named["ranks"]) == ("c", [1])
    assert changed(kept, 0 + 1, 3)
    assert not changed(kept, 1, 2)


def parts_after(values: tuple[float, ...]) -> dict[str, Tensor]:
    """This rank's part of a state, after gradients of these values, of which the last rank's part may not be finite."""
    parameters = {"weight": torch.nn.Parameter(torch.ones(5))}
    optimizer = Optimizer(parameters, Training(lr=1e-2, ema=0.5), sharded=True)
    for value in values:
        parameters["weight"].grad = torch.tensor([1.0, 1.0, 1.0, 1.0, value])
        optimizer.step(norm=norm_over(None, global_norm(optimizer.gradients())))
    return {name: part_of(value).values.clone() for name, value in optimizer.tensors().items()}


def test_a_dealt_out_optimizer_skips_a_step_on_every_rank() -> None:
    for skipped, without in zip(
        run_ranks(2, parts_after, (1.0, float("nan"), 2.0)), run_ranks(2, parts_after, (1.0, 2.0)), strict=True
    ):
        assert skipped.keys() == without.keys()
        assert all(torch.equal(value, without[name]) for name, value in skipped.items())


def test_an_optimizer_that_cannot_look_at_the_norm_is_not_asked() -> None:
    parameters = {"weight": torch.nn.Parameter(torch.ones(2))}
    optimizer = Optimizer(parameters, Training(clip_norm=0.0, lr=0.5, optimizer=TorchClass("RMSprop")))
    alone = torch.nn.Parameter(torch.ones(2))
    torchs = torch.optim.RMSprop([alone], lr=0.5)
    for value in (float("nan"), 0.25):
        parameters["weight"].grad = torch.full((2,), value)
        optimizer.step()
        assert parameters["weight"].tolist() == pytest.approx(alone.tolist()) or math.isfinite(value)
    alone.grad = torch.full((2,), 0.25)
    torchs.step()
    assert parameters["weight"].tolist() == pytest.approx(alone.tolist())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (broken(when=ALWAYS), r"steps 1 to 2 were skipped. In the last, the loss of clip c \(rank 1\) is not finite"),
        (broken("inf", when=ALWAYS), r"the loss of clip c \(rank 1\) is not finite"),
        (GRADIENT, r"steps 0 to 1 were skipped.*norm of the gradient is not a number, though the loss of every clip"),
    ],
)
def test_too_many_in_a_row_end_the_run(tmp_path: Path, more: str, told: str) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2, more=more)
    with pytest.raises(RankError, match=told):
        train_on(2, folder, steps=9, max_skipped=2)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(value: float) -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = poisoning(weight.sum() + value)  # the gradient of the sum itself is finite
    loss.backward()
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all()) is (value == 2.0)
    assert value != 2.0 or (loss.item(), weight.grad.tolist()) == (4.0, [1.0, 1.0])


def test_of_a_micro_batch_the_rows_say_which_clip_it_is() -> None:
    prediction, target = torch.ones(3, 2), torch.ones(3, 2)
    target[1, 0] = torch.nan
    rows = finite_rows(prediction, target, 3)
    assert rows is not None and rows.tolist() == [True, False, True]
    assert finite_rows(prediction, target, 2) is None
    losses = {"c0": torch.tensor(torch.nan), "c1": torch.tensor(torch.inf), "c2": torch.tensor(1.0)}
    clips: dict[str, list[str | int]] = {"c0": ["a", "b", "c"], "c1": [4, 5], "c2": ["d"]}
    assert not_finite(losses, {"c0": rows, "c1": torch.tensor([True, True])}, clips) == ["b", 4, 5]
