"""The executor on several gloo ranks: what it computes is what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arachnec.backends.reference import run_reference
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from tests.distributed.executor_cases import (
    Work,
    assert_same_gradients,
    clip,
    executable,
    plain_loop,
    train_on,
)
from tests.distributed.harness import RankError

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 1, 24, 16), clip("e", 7))
ALONE = [Work((0, 1), (0,), 0.0), Work((2,), (1,), 0.0), Work((3,), (0,), 1.0), Work((4,), (1,), 1.0)]
MIXED = [Work((0, 1), (0, 1, 2), 0.0), Work((2,), (3,), 0.0), Work((3,), (3,), 1.0), Work((4,), (0, 1, 2, 3), 2.0)]
PAIRS = [
    Work((4,), (2, 3), 0.0),
    Work((1,), (0, 1), 0.0),
    Work((0,), (1, 0), 1.0),
    Work((2,), (3,), 1.0),
    Work((3,), (2,), 1.0),
]
ENCODED = [
    Work((0, 1), (1,), 0.0, "vae"),
    Work((2,), (0,), 0.0, "vae"),
    Work((3,), (0,), 1.0, "vae"),
    Work((4,), (1,), 1.0, "vae"),
    Work((2,), (1,), 2.0, "dit", ("c1",)),
    Work((0, 1), (0,), 2.0, "dit", ("c0",)),
    Work((4,), (0,), 3.0, "dit", ("c3",)),
    Work((3,), (1,), 3.0, "dit", ("c2",)),
]

SHARED_OUT = [
    Work((0, 1), (2, 0), 0.0, "vae"),
    Work((2,), (1,), 0.0, "vae"),
    Work((3,), (1,), 1.0, "vae"),
    Work((4,), (0, 2), 1.0, "vae"),
    Work((0, 1), (0, 1, 2), 2.0, "dit", ("c0",)),
    Work((2,), (1,), 3.0, "dit", ("c1",)),
    Work((3,), (0,), 3.0, "dit", ("c2",)),
    Work((4,), (2,), 3.0, "dit", ("c3",)),
]
NOTES_LOADS = """

class Vae(Vae):
    def load(self, clip, device):
        import pathlib
        import torch.distributed as dist

        if device.type != "meta":
            pathlib.Path(__file__).with_name(f"loaded-{clip.id}-{dist.get_rank()}").touch()
        return super().load(clip, device)
"""


@pytest.mark.parametrize(
    ("ranks", "works", "encoder"),
    [
        pytest.param(2, ALONE, False, id="degree-one"),
        pytest.param(4, MIXED, False, id="three-beside-one-then-four"),
        pytest.param(4, PAIRS, False, id="pairs"),
        pytest.param(2, ENCODED, True, id="encoded-elsewhere"),
        pytest.param(3, SHARED_OUT, True, id="encoded-together"),
    ],
)
def test_every_plan_has_the_loss_and_gradients_of_a_plain_loop(
    tmp_path: Path, ranks: int, works: list[Work], encoder: bool
) -> None:
    folder = executable(tmp_path, [CLIPS], works, ranks, encoder=encoder)
    report = train_on(ranks, folder, save_gradients=tmp_path / "g.safetensors")
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(report["steps"][0]["loss"] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(tmp_path / "g.safetensors", gradients)


def test_an_encoders_ranks_share_out_its_clips(tmp_path: Path) -> None:
    folder = executable(tmp_path, [CLIPS], SHARED_OUT, 3, encoder=True, more=NOTES_LOADS)
    train_on(3, folder)
    loaded = {path.name.removeprefix("loaded-") for path in folder.glob("loaded-*")}
    assert loaded == {"a-2", "b-0", "c-1", "d-1", "e-0", "e-2"}  # clip e is alone in its cascade


@pytest.mark.parametrize("encoder", [False, True])
def test_the_reference_has_the_loss_and_gradients_of_a_plain_loop(tmp_path: Path, encoder: bool) -> None:
    folder = executable(tmp_path, [CLIPS], ENCODED if encoder else ALONE, 2, encoder=encoder)
    read = read_executable(folder)
    outcome = run_reference(read.program, read.model_file(), dict(enumerate(read.clips)))
    loss, gradients = plain_loop(folder, CLIPS)
    assert abs(outcome.loss - loss) <= 1e-6 * abs(loss)
    for name, value in gradients.items():
        torch.testing.assert_close(outcome.gradients[name], value, rtol=1e-4, atol=1e-6)


def test_noise_follows_seed_step_and_clip_so_later_steps_draw_anew(tmp_path: Path) -> None:
    folder = executable(tmp_path, [CLIPS], ALONE, 2, training=Training(lr=0.0, seed=5))
    report = train_on(2, folder, steps=2)
    for step in range(2):
        loss, _ = plain_loop(folder, CLIPS, seed=5, step=step)
        assert abs(report["steps"][step]["loss"] - loss) <= 1e-6 * abs(loss)


def test_a_run_resumed_on_another_number_of_ranks_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    two = executable(tmp_path / "two", [CLIPS], ALONE, 2, training=Training(lr=1e-2, ema=0.9, dtype="bf16"))
    one = executable(
        tmp_path / "one",
        [CLIPS],
        [Work((i,), (0,), float(i)) for i in range(5)],
        1,
        training=read_executable(two).training,
    )
    whole = train_on(2, two, steps=4)
    train_on(2, two, steps=2, checkpoint=tmp_path / "kept")
    rest = train_on(1, one, more=2, checkpoint=tmp_path / "kept", resume=True)
    assert [step["step"] for step in rest["steps"]] == [2, 3]
    for resumed, straight in zip(rest["steps"], whole["steps"][2:], strict=True):
        # The two plans sum in another order, and bf16 gradients are rounded where they are summed.
        assert abs(resumed["loss"] - straight["loss"]) <= 2e-3 * abs(straight["loss"])


def test_fp32_losses_after_a_resume_agree_to_rounding(tmp_path: Path) -> None:
    folder = executable(tmp_path / "two", [CLIPS], ALONE, 2, training=Training(lr=1e-2))
    whole = train_on(2, folder, steps=3)
    train_on(2, folder, steps=1, checkpoint=tmp_path / "kept")
    rest = train_on(2, folder, more=2, checkpoint=tmp_path / "kept", resume=True)
    assert [step["loss"] for step in rest["steps"]] == [step["loss"] for step in whole["steps"][1:]]


def test_a_checkpoint_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    folder = executable(tmp_path / "two", [CLIPS], ALONE, 2, training=Training(lr=1e-2))
    kept = tmp_path / "kept"
    train_on(2, folder, steps=3, checkpoint=kept, every=1)
    assert sorted(path.name for path in kept.glob("step-*")) == ["step-00000002", "step-00000003"]
    torn = next(kept.glob("step-00000003/rank-00001.safetensors"))
    torn.write_bytes(torn.read_bytes()[:-7])
    rest = train_on(2, folder, more=1, checkpoint=kept, resume=True)
    assert rest["steps"][0]["step"] == 2


def test_training_on_the_same_clips_lowers_the_loss(tmp_path: Path) -> None:
    folder = executable(tmp_path, [CLIPS], ALONE, 2, training=Training(lr=2e-2))
    steps = train_on(2, folder, steps=30)["steps"]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]


def test_a_program_that_does_not_check_is_not_run(tmp_path: Path) -> None:
    folder = executable(tmp_path, [CLIPS], ALONE, 2)
    program = folder / "program.cascade"
    lines = program.read_text().splitlines(keepends=True)
    first = next(i for i, text in enumerate(lines) if text.strip().startswith("backward %"))
    program.write_text("".join(lines[:first] + lines[first + 1 :]))
    with pytest.raises(RankError, match="UserError"):
        train_on(2, folder)


def test_the_report_says_what_was_measured_and_the_timeline_has_every_instruction(tmp_path: Path) -> None:
    import msgspec

    folder = executable(tmp_path, [CLIPS], ENCODED, 2, encoder=True)
    report = train_on(2, folder, steps=2)
    assert report["ranks"] == 2
    for step in report["steps"]:
        assert step["step_ms"] > 0 and step["tokens_per_s"] > 0 and step["planned_ms"] > 2.0
        assert 0 <= step["imbalance"] < 1
    intervals = msgspec.json.decode((folder / "measured.json").read_bytes())["intervals"]
    program = read_executable(folder).program
    for rank in range(2):
        done = [(i["op"], i["target"]) for i in intervals if i["rank"] == rank and i["op"] != "wait"]
        steps = [(step.op, step.target) for step in program.programs[rank].instructions]
        # a sum is started in its place, and waited for before the update
        steps.insert(steps.index(("step", "dit")), ("reduce", "dit"))
        assert done == steps
    assert all(0 <= i["start"] <= i["end"] for i in intervals)
    received = {step.target for p in program.programs for step in p.instructions if step.op == "receive"}
    assert {i["target"] for i in intervals if i["op"] == "wait"} == received
