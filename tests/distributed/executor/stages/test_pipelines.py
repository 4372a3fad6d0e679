"""Pipelines on gloo ranks: the gradients of plain PyTorch, whatever the schedule and the cuts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from tests.distributed.executor_cases import assert_same_gradients, clip, plain_loop, train_on
from tests.distributed.pipeline_cases import FROZEN, executable, pipeline_of
from tests.distributed.rank_device import ROUNDING
from tests.slow import slow

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2), clip("e", 4))


def assert_exact(saved: Path, expected: dict[str, torch.Tensor]) -> None:
    gradients = load_file(saved)
    assert set(gradients) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            gradients[name], value, rtol=1e3 * ROUNDING, atol=1e-2 * ROUNDING, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("world", "stages", "schedule"),
    [
        slow(2, "p=2", "schedule=gpipe"),
        (2, "p=2", "schedule=1f1b"),
        (2, "p=2", "schedule=zb-h1"),
        (2, "p=2", "schedule=zb-h2"),
        slow(4, "p=4", "schedule=zb-h2"),
        (2, "p=4", "schedule=interleaved-1f1b"),
        (2, "p=4", "schedule=zb-v"),
        slow(4, "p=4", "schedule=zb-h1"),
        (4, "p=2", "schedule=planned"),
        slow(4, "cuts=[1]", "schedule=1f1b"),
        (2, "p=2", "schedule=kfkb"),
        slow(3, "cuts=[1],replicas=[1,2]", "schedule=dapple"),
        (4, "cuts=[2,3],replicas=[2,1,1]", "schedule=dapple,policy=B"),
        (4, "cuts=[1],replicas=[1,2]", "schedule=dapple"),  # the last rank is idle
    ],
)
def test_gradients_are_those_of_plain_pytorch(tmp_path: Path, world: int, stages: str, schedule: str) -> None:
    """Of five clips of four lengths, so replicas have unequal numbers; with encoder, skip and tied parameters."""
    folder = executable(tmp_path, world, [CLIPS], pipeline_of(stages, schedule), encoder=True)
    report = train_on(world, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    loss, expected = plain_loop(folder, CLIPS)
    assert report["steps"][0]["loss"] == pytest.approx(loss, rel=ROUNDING)
    assert_exact(tmp_path / "g.safetensors", expected)


def test_three_runs_of_stages_on_each_rank_have_the_gradients_of_plain_pytorch(tmp_path: Path) -> None:
    folder = executable(tmp_path, 2, [CLIPS], pipeline_of("p=6", "schedule=interleaved-1f1b,v=3"), blocks=3)
    train_on(2, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    assert_exact(tmp_path / "g.safetensors", plain_loop(folder, CLIPS)[1])


def test_orders_of_a_file_with_three_stages_on_two_ranks_have_the_gradients_of_plain_pytorch(tmp_path: Path) -> None:
    """In cells of two: the rows of the file say how many ranks a stage has. Backwards are whole and split."""
    file = tmp_path / "orders.csv"
    file.write_text(
        "0F0,0F1,2F0,2I0,2F1,2I1,0I0,0I1,2W0,2W1,0W0,0W1,0F2,0F3,0F4,2F2,2B2,2F3,2B3,2F4,2B4,0B2,0B3,0B4\n"
        "1F0,1F1,1B0,1B1,1F2,1F3,1F4,1B2,1I3,1B4,1W3\n"
    )
    folder = executable(tmp_path, 4, [CLIPS], pipeline_of("cuts=[1,3]", f'orders="{file}"', cell=2))
    train_on(4, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    assert_exact(tmp_path / "g.safetensors", plain_loop(folder, CLIPS)[1])


def test_sequence_parallel_stages_that_recompute_have_the_gradients_of_plain_pytorch(tmp_path: Path) -> None:
    """Two stages on two ranks each: ranks of one stage and the next go in pairs, each with its part of a gradient."""
    passes = pipeline_of("p=2", "schedule=zb-h1,degree=2,recompute=true")
    folder = executable(tmp_path, 4, [CLIPS], passes)
    train_on(4, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    assert_exact(tmp_path / "g.safetensors", plain_loop(folder, CLIPS)[1])


def test_gradients_of_low_precision_weights_come_whole_to_the_first_rank(tmp_path: Path) -> None:
    """Weights are bf16 and their gradients fp32, on the stage that has them and on the rank that saves all."""
    low = "\n\ndef build():\n    return Hard().bfloat16()\n"
    folder = executable(tmp_path, 2, [CLIPS], pipeline_of("p=2", "schedule=zb-h1"), more=low)
    train_on(2, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    assert {value.dtype for value in load_file(tmp_path / "g.safetensors").values()} == {torch.float32}
    assert_same_gradients(tmp_path / "g.safetensors", plain_loop(folder, CLIPS)[1], 0.03)


def test_a_frozen_first_stage_has_no_backward(tmp_path: Path) -> None:
    folder = executable(tmp_path, 2, [CLIPS], pipeline_of("p=2", "schedule=1f1b"), more=FROZEN, trained=("second",))
    report = train_on(2, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    loss, expected = plain_loop(folder, CLIPS)
    assert report["steps"][0]["loss"] == pytest.approx(loss, rel=ROUNDING)
    assert_exact(tmp_path / "g.safetensors", {name: value for name, value in expected.items() if "second" in name})


def test_clipping_counts_the_gradients_of_all_stages_once(tmp_path: Path) -> None:
    """With a weight that two stages share: the norm is that of the whole gradient, and so is the next step's loss."""
    training = Training(clip_norm=0.05, lr=0.01)
    folders = {}
    for name, world, passes in (
        ("two", 2, pipeline_of("p=2", "schedule=1f1b")),
        ("four", 4, pipeline_of("p=4", "schedule=zb-h1")),
    ):
        folders[name] = executable(tmp_path / name, world, [CLIPS], passes, training=training)
        train_on(world, folders[name], steps=3)
    _, expected = plain_loop(folders["two"], CLIPS)
    norm = float(torch.stack([value.norm() for value in expected.values()]).norm())
    steps = {name: msgspec.json.decode((folder / "run.json").read_bytes())["steps"] for name, folder in folders.items()}
    assert steps["two"][0]["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    assert norm > 0.05
    for two, four in zip(steps["two"], steps["four"], strict=True):
        assert two["loss"] == pytest.approx(four["loss"], rel=1e-7)


def test_an_optimizer_dealt_out_over_a_stages_ranks_steps_and_resumes_as_one_that_is_whole(tmp_path: Path) -> None:
    """Two stages on two ranks each share a weight; clipped; a checkpoint goes on where the optimizer is whole."""
    training = Training(clip_norm=0.05, lr=0.01, ema=0.9)
    dealt_out = pipeline_of("p=2", "schedule=zb-h1,degree=1")
    over = executable(tmp_path / "over", 4, [CLIPS], dealt_out, training=training, crowded=True)
    assert all(step.attrs["sharded"] == 2 for step in read_executable(over).program.stages if step.trained)
    whole = executable(tmp_path / "whole", 2, [CLIPS], pipeline_of("p=2", "schedule=1f1b"), training=training)
    expected = train_on(2, whole, steps=3)["steps"]
    steps = train_on(4, over, steps=2, checkpoint=tmp_path / "kept")["steps"]
    steps += train_on(2, whole, more=1, checkpoint=tmp_path / "kept", resume=True)["steps"]
    for ours, plain in zip(steps, expected, strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-9)
        assert ours["gradient_norm"] == pytest.approx(plain["gradient_norm"], rel=1e-6)


def test_a_checkpoint_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    """Two steps on two stages, then one on four: the loss of the third step of one run."""
    kept = tmp_path / "kept"
    two = executable(tmp_path / "two", 2, [CLIPS], pipeline_of("p=2", "schedule=1f1b"), training=Training(lr=0.01))
    train_on(2, two, steps=2, checkpoint=kept)
    four = executable(tmp_path / "four", 4, [CLIPS], pipeline_of("p=4", "schedule=zb-h1"), training=Training(lr=0.01))
    resumed = train_on(4, four, more=1, checkpoint=kept, resume=True)
    through = train_on(2, two, steps=3)
    assert resumed["steps"][0]["loss"] == pytest.approx(through["steps"][2]["loss"], rel=1e-9)


@pytest.mark.parametrize(("stages", "schedule"), [("p=2", "schedule=1f1b"), ("p=4", "schedule=zb-v")])
def test_an_update_of_several_batches_has_the_gradients_of_all_their_clips(
    tmp_path: Path, stages: str, schedule: str
) -> None:
    training = Training(clip_norm=0.0, accumulate=2, lr=0.0)
    passes = pipeline_of(stages, schedule)
    folder = executable(tmp_path, 2, [CLIPS], passes, encoder=True, training=training)
    report = train_on(2, folder, save_gradients=tmp_path / "g.safetensors", steps=2)
    rows = [plain_loop(folder, CLIPS, step=number) for number in range(4)]
    for number, step in enumerate(report["steps"]):
        assert step["loss"] == pytest.approx((rows[2 * number][0] + rows[2 * number + 1][0]) / 2, rel=ROUNDING)
    mean = {name: (value + rows[3][1][name]) / 2 for name, value in rows[2][1].items()}
    assert_exact(tmp_path / "g.safetensors", mean)
