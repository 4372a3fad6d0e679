"""The lines of an epoch name every clip of the manifest once, whatever interrupted the run, and on whatever ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from arachnec.backends.torch_distributed.local_run import pictures
from arachnec.backends.torch_distributed.reporting.logs import (
    AuditLine,
    AuditLog,
    ValidationLine,
    lines_of,
    losses,
    validation_losses,
)
from arachnec.backends.torch_distributed.reporting.report import ClipNote
from arachnec.backends.torch_distributed.run.step_account import loss_of_step
from arachnec.ir.diagnostic import UserError
from tests.distributed.executor_cases import Work, clip, executable, train_on
from tests.distributed.harness import RankError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES = [[clip("a", 3), clip("b", 5)], [clip("c", 2), clip("d", 2), clip("e", 3)], [clip("f", 9)]]
WORKS = [Work((0,), (0,), 0), Work((1,), (1,), 0)]
# A rank fails once it has made the batches of so many clips.
INTERRUPTED = """

from pathlib import Path

def sample(clip, generator, inner=sample, seen=[]):
    seen.append(clip.id)
    if len(seen) >= int(Path("{place}").read_text()):
        raise ValueError("interrupted")
    return inner(clip, generator)
"""
UNEVEN_NAN = """

def sample(clip, generator, inner=sample):
    kwargs, target = inner(clip, generator)
    return kwargs, target * float("nan") if clip.id == "d" else target
"""


def epochs(folder: Path) -> list[list[AuditLine]]:
    return [list(lines_of(file)) for file in sorted((folder / "audit").glob("epoch-*.jsonl"))]


def demand_every_clip_once(lines: list[AuditLine]) -> None:
    seen = Counter(clip for line in lines for clip in [*line.trained, *(note.clip for note in line.set_aside)])
    assert seen == Counter(clip.id for batch in BATCHES for clip in batch)


def test_after_interruptions_and_on_other_ranks_every_clip_is_there_once_an_epoch(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    steps = 0
    for ranks, fails, more in ((2, 7, 9), (1, 5, 9), (2, None, 3), (1, None, 1)):
        place = tmp_path / "fails"
        place.write_text(str(fails or 1000))
        code = INTERRUPTED.format(place=place)
        folder = executable(tmp_path / "build", BATCHES, WORKS, 2, more=code)
        options = {"more": more, "checkpoint": kept, "every": 1, "resume": True, "keep": 1}
        if fails:
            with pytest.raises(RankError, match="interrupted"):
                train_on(ranks, folder, **options)
        else:
            steps = train_on(ranks, folder, **options)["steps"][-1]["step"] + 1
    assert steps > 3
    lines = [line for epoch in epochs(kept) for line in epoch]
    assert [line.step for line in lines] == list(range(steps))
    for epoch in epochs(kept)[: steps // 3]:
        demand_every_clip_once(epoch)
    assert losses(kept, 1) == {line.step: line.loss for line in lines}, "of all calls, not of the last alone"
    assert list(losses(kept, 1)) == list(range(steps))


def test_the_clips_of_a_skipped_step_count_as_seen(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", BATCHES, WORKS, 2, more=UNEVEN_NAN)
    train_on(2, folder, steps=3)
    (lines,) = epochs(folder)
    demand_every_clip_once(lines)
    assert [line.skipped for line in lines] == [False, True, False]
    assert [note.clip for note in lines[1].not_finite] == ["d"]


def test_lost_steps_and_a_line_that_was_cut_off_are_dropped(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, lambda step: step // 2, 0)
    for step in range(5):
        log.add(AuditLine(step, [f"clip {step}"]))
    log.sync(4)
    last = tmp_path / "audit" / "epoch-00002.jsonl"
    last.write_bytes(last.read_bytes() + b'{"step": 5, "trai')
    assert [line.step for line in lines_of(last)] == [4]
    again = AuditLog(tmp_path, lambda step: step // 2, 3)
    again.add(AuditLine(3, ["other"]))
    assert [[line.step for line in epoch] for epoch in epochs(tmp_path)] == [[0, 1], [2, 3]]
    assert epochs(tmp_path)[1][1].trained == ["other"]


def test_a_damaged_line_is_told_with_its_file_and_one_that_is_dropped_anyway_is_not(tmp_path: Path) -> None:
    AuditLog(tmp_path, lambda step: step // 2, 0).add(AuditLine(0, ["a"]))
    file = tmp_path / "audit" / "epoch-00000.jsonl"
    file.write_bytes(file.read_bytes() + b"\xff{\n")
    with pytest.raises(UserError, match=r"line 2 of the audit log .*epoch-00000.jsonl cannot be read"):
        AuditLog(tmp_path, lambda step: step // 2, 1)
    AuditLog(tmp_path, lambda step: step // 2, 0)
    assert not file.exists()


def test_the_loss_of_a_step_of_several_batches_is_the_mean_of_its_clips() -> None:
    assert loss_of_step([AuditLine(0, ["a"], loss=2.0)]) == 2
    aside = [ClipNote("d", "no video")]
    both = [AuditLine(0, ["a", "b"], loss=1.0), AuditLine(1, ["c"], set_aside=aside, loss=0.5)]
    assert loss_of_step(both) == pytest.approx(1.5 * 4 / 3), "shares of four clips, of which three took part"
    assert loss_of_step([*both, AuditLine(2, ["e"])]) is None


def test_validation_losses_are_those_of_steps_that_count(tmp_path: Path) -> None:
    log = AuditLog(tmp_path, lambda step: step // 4, 0)
    for step, loss in ((1, 3.0), (3, None), (5, 2.0)):
        log.add(AuditLine(step, ["a"], loss=4.0))
        log.add_validation(ValidationLine(step, loss))
    assert validation_losses(tmp_path, 1) == {1: 3.0, 5: 2.0}
    assert validation_losses(tmp_path, 2) == {0: 3.0, 2: 2.0}
    AuditLog(tmp_path, lambda step: step // 4, 4)  # resumed: step 5 is lost
    assert validation_losses(tmp_path, 1) == {1: 3.0}
    AuditLog(tmp_path, lambda step: step // 4, 0)  # begun anew
    assert validation_losses(tmp_path, 1) == {}


def test_the_picture_of_the_loss_has_the_validation_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn: list[tuple[str, list[float]]] = []

    def savefig(figure: Figure, *_: object, **__: object) -> None:
        drawn.extend((str(line.get_label()), list(line.get_ydata())) for line in figure.axes[0].lines)

    monkeypatch.setattr(pyplot.Figure, "savefig", savefig)
    (line,) = pictures(tmp_path, {0: 3.0, 1: 2.5, 2: 2.0}, {1: 2.75}, 2)
    assert drawn == [("training", [3.0, 2.5, 2.0]), ("validation", [2.75])]
    assert "validation loss" in line
