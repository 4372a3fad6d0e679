"""A clip that cannot be read is set aside by name, and the step is that of the other clips, on any number of ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from arachnec.backends.torch_distributed.batches.load_ahead import TRIES, LoadAhead
from arachnec.backends.torch_distributed.batches.set_aside import LeftOut, is_unreadable, reason_of, usable
from arachnec.backends.torch_distributed.reporting.logs import lines_of
from arachnec.data.clip import VideoClip
from arachnec.data.video import UnreadableVideo
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.models.encoders import VideoEncoder
from arachnec.runtime.device_runtime import DeviceRuntime
from tests.distributed.executor_cases import (
    Work,
    assert_same_gradients,
    clip,
    executable,
    plain_loop,
    train_on,
)
from tests.distributed.harness import RankError, run_ranks

CLIPS = [clip("a", 2), clip("b", 2), clip("c", 3), clip("d", 2)]
PLAN = [
    Work((0, 1), (0, 1), 0, "vae"),
    Work((2,), (1,), 1, "vae"),
    Work((3,), (1,), 2, "vae"),
    Work((0, 1), (0, 1), 3, inputs=("c0",)),  # a micro-batch on two ranks
    Work((2,), (1,), 4, inputs=("c1",)),
    Work((3,), (0,), 5, inputs=("c2",)),  # encoded on the other rank
]
UNREADABLE = """

class Vae(Vae):
    def load(self, clip, device):
        if torch.device(device).type != "meta" and clip.id in {broken}:
            raise OSError(f"{{clip.id}}.mp4 is damaged")
        return super().load(clip, device)
"""


@pytest.mark.parametrize(
    ("broken", "ranks"),
    [
        pytest.param("b", 2, id="one-of-a-micro-batch-on-two-ranks"),
        pytest.param("ab", 2, id="a-whole-micro-batch"),
        pytest.param("cd", 2, id="with-a-handoff"),
        pytest.param("ac", 1, id="on-one-rank"),
    ],
)
def test_the_step_is_that_of_the_other_clips(tmp_path: Path, broken: str, ranks: int) -> None:
    more = UNREADABLE.format(broken=set(broken))
    folder = executable(
        tmp_path / "build", [CLIPS], PLAN, 2, encoder=True, more=more, training=Training(lr=0.0, clip_norm=0.0)
    )
    report = train_on(ranks, folder, steps=2, save_gradients=tmp_path / "g")
    kept = [clip for clip in CLIPS if clip.id not in broken]
    for step in report["steps"]:
        loss, gradients = plain_loop(folder, kept, step=step["step"])
        assert step["loss"] == pytest.approx(loss, rel=1e-5)
        assert {note["clip"]: note["reason"] for note in step["set_aside"]} == {
            name: f"{name}.mp4 is damaged" for name in broken
        }
    assert_same_gradients(tmp_path / "g", gradients)
    for line in lines_of(folder / "audit" / "epoch-00001.jsonl"):
        assert sorted(map(str, line.trained)) == [str(clip.id) for clip in kept]
        assert sorted(str(note.clip) for note in line.set_aside) == sorted(broken)


def test_a_step_of_which_no_clip_can_be_read_ends_the_run_by_name(tmp_path: Path) -> None:
    more = UNREADABLE.format(broken=set("abcd"))
    folder = executable(tmp_path / "build", [CLIPS], PLAN, 2, encoder=True, more=more)
    with pytest.raises(RankError, match=r"no clip of step 0 can be used: clip \w: \w.mp4 is damaged"):
        train_on(2, folder, steps=2)


def test_a_damaged_video_is_one_that_cannot_be_read_and_a_wrong_manifest_is_not(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    encoder = VideoEncoder(nn.Linear(1, 1))
    with pytest.raises(UserError) as damaged:
        encoder.load(replace(CLIPS[0], path=tmp_path / "a.mp4"), "cpu")
    assert is_unreadable(damaged.value)
    assert reason_of(damaged.value).startswith(f"the video `{tmp_path / 'a.mp4'}` cannot be decoded")
    with pytest.raises(UserError) as without:
        encoder.load(CLIPS[0], "cpu")
    assert not is_unreadable(without.value)


class Flaky(nn.Module):
    """Reads at the ``works``-th try."""

    def __init__(self, works: int, error: Exception) -> None:
        super().__init__()
        self.works, self.error, self.tries = works, error, 0

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        self.tries += 1
        if self.tries < self.works:
            raise self.error
        return torch.ones(1)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arachnec.backends.torch_distributed.batches.load_ahead.BETWEEN_TRIES_S", 0.0)


@pytest.mark.parametrize("works", [1, TRIES, TRIES + 1])
def test_a_clip_is_tried_again_before_it_is_set_aside(works: int) -> None:
    encoder = Flaky(works, UserError(UnreadableVideo(None, "a.mp4", "it is cut off")))
    loads = LoadAhead(ThreadPoolExecutor(1), {"vae": encoder}, DeviceRuntime.of(torch.device("cpu")))
    taken = loads.take_readable(0, "vae", CLIPS[0])
    assert (taken is None) is (works > TRIES)
    told = {"a": "the video `a.mp4` cannot be decoded: it is cut off"}
    assert loads.unreadable == (told if taken is None else {})


@pytest.mark.parametrize(
    ("error", "unreadable"),
    [
        (UserError(UnreadableVideo(None, "a.mp4", "x")), True),
        (FileNotFoundError("a.mp4"), True),
        (user_error("clip `a` has no video"), False),
        (AttributeError("a mistake in the model file"), False),
    ],
)
def test_a_mistake_of_the_model_file_or_the_manifest_is_no_bad_clip(error: Exception, unreadable: bool) -> None:
    assert is_unreadable(error) is unreadable


def test_only_a_value_without_any_number_is_set_aside() -> None:
    value = torch.ones(3, 2, 2)
    value[0] = torch.nan
    value[1, 0, 0] = torch.nan  # a model may do so, and the step is skipped
    changed, kept = usable({"vae": value, "text": torch.ones(3, 1)}, 3)
    assert kept == [1, 2]
    assert changed["vae"][0].eq(0).all() and changed["vae"][1].isnan().any()
    same, all_kept = usable({"vae": torch.ones(3, 2)}, 3)
    assert all_kept == [0, 1, 2] and same["vae"].eq(1).all()


def factors(shares: list[float]) -> float:
    return LeftOut(shares[torch.distributed.get_rank()]).factor(4)


@pytest.mark.parametrize(
    ("shares", "factor"),
    [([0.0, 0.0], 1.0), ([0.5, 0.5], 4 / 3), ([1.0, 1.0], 2.0), ([0.5, 0.0], None), ([2.0, 2.0], None)],
)
def test_the_gradient_is_that_of_the_mean_over_who_took_part(shares: list[float], factor: float | None) -> None:
    for told in run_ranks(2, factors, shares):
        assert told != told if factor is None else told == pytest.approx(factor)
