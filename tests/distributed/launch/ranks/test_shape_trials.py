"""Clip shapes for which compiling had no time are tried in the background, before their first step; a mistake names the
clip."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.plans.shape_trials import ShapeTrials
from arachnec.backends.torch_distributed.plans.step_plans import Plans
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import HEADER, read_executable
from arachnec.ir.diagnostic import UserError, render
from tests.distributed.executor_cases import Work, clip, executable
from tests.distributed.harness import run_ranks

FIRST, LATER = (clip("a", 3), clip("b", 5)), (clip("c", 3), clip("unlucky", 7))
WORKS = [Work((0,), (0,), 0.0), Work((1,), (0,), 1.0)]
CHOOSY = """

class Choosy(Tiny):
    def forward(self, x, time):
        y = super().forward(x, time)
        if y.shape[1] == 28:
            raise ValueError("no head for that many")
        return y


def build():
    return Choosy()
"""


def untried(folder: Path, shapes: Sequence[VideoClip]) -> Path:
    """An executable that was compiled without time for these shapes."""
    executable(folder, [FIRST, LATER], WORKS, 1, more=CHOOSY)
    header = json.loads((folder / HEADER).read_text())
    (folder / HEADER).write_text(json.dumps(header | {"untried": [c.shape for c in shapes]}))
    return folder


def test_the_first_step_waits_for_its_shapes_and_a_later_one_is_refused_by_its_clip(tmp_path: Path) -> None:
    ((compiled, refused),) = run_ranks(1, _steps, untried(tmp_path, [*FIRST, *LATER]))
    assert compiled == "by_hand"  # tried first, and not planned again
    assert "the model cannot take clip unlucky (7 x 16 x 16, 0 text tokens): ValueError: no head" in refused


def _steps(folder: Path) -> tuple[str, str]:
    plans = Plans(read_executable(folder), 0, 1)
    first = plans.get(0)
    assert first is not None
    with pytest.raises(UserError) as refused:
        plans.get(1)
    plans.close()
    return first.module.name, render(refused.value.diagnostics[0])


def test_shapes_are_tried_in_the_order_of_their_clips_and_none_twice(tmp_path: Path) -> None:
    trials = ShapeTrials.of(read_executable(untried(tmp_path, [LATER[1], FIRST[1]])))
    assert [c.id for c in trials.listed.values()] == ["b", "unlucky"]
    trials.try_next()
    assert trials.left == {LATER[1].shape}
    trials.try_clips([("a", FIRST[0].shape), ("b", FIRST[1].shape)])  # tried at compile, and just now
    trials.try_next()
    assert not trials.unfinished
    with pytest.raises(UserError, match="unlucky"):  # known now, and told with whatever is asked for next
        trials.try_clips([("a", FIRST[0].shape)])


def test_a_clip_that_no_executable_lists_is_tried_by_its_sizes(tmp_path: Path) -> None:
    trials = ShapeTrials.of(read_executable(untried(tmp_path, [clip("x", 7, 32, 8)])))
    assert trials.left
    assert not trials.unfinished
    with pytest.raises(UserError, match="cannot take clip drawn"):
        trials.try_clips([("drawn", (7, 32, 8, 0))])
