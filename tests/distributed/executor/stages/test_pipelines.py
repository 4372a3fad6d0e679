"""Pipelines on gloo ranks: the gradients of plain PyTorch, whatever the schedule and the cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arachnec.executable.training_options import Training
from tests.distributed.executor_cases import assert_same_gradients, clip, plain_loop, train_on
from tests.distributed.pipeline_cases import executable, pipeline_of
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
        slow(2, "p=2", "schedule=zb-h1"),
        (2, "p=2", "schedule=zb-h2"),
        slow(4, "p=4", "schedule=zb-h2"),
        (2, "p=4", "schedule=interleaved-1f1b"),
        slow(2, "p=4", "schedule=zb-v"),
        slow(4, "p=4", "schedule=zb-h1"),
        slow(4, "p=2", "schedule=planned"),
        slow(4, "cuts=[1]", "schedule=1f1b"),
        slow(2, "p=2", "schedule=kfkb"),
        slow(3, "cuts=[1],replicas=[1,2]", "schedule=dapple"),
        slow(4, "cuts=[2,3],replicas=[2,1,1]", "schedule=dapple,policy=B"),
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


def test_gradients_of_low_precision_weights_come_whole_to_the_first_rank(tmp_path: Path) -> None:
    """Weights are bf16 and their gradients fp32, on the stage that has them and on the rank that saves all."""
    low = "\n\ndef build():\n    return Hard().bfloat16()\n"
    folder = executable(tmp_path, 2, [CLIPS], pipeline_of("p=2", "schedule=zb-h1"), more=low)
    train_on(2, folder, save_gradients=tmp_path / "g.safetensors", steps=1)
    assert {value.dtype for value in load_file(tmp_path / "g.safetensors").values()} == {torch.float32}
    assert_same_gradients(tmp_path / "g.safetensors", plain_loop(folder, CLIPS)[1], 0.03)


@pytest.mark.parametrize(("stages", "schedule"), [slow("p=2", "schedule=1f1b"), ("p=4", "schedule=zb-v")])
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
