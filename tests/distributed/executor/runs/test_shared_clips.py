"""Ranks that share a clip and draw other numbers for it are told in its first step; an error names its clip."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.executor_cases import Work, clip, executable, train_on
from tests.distributed.harness import RankError

CLIPS = (clip("a", 3), clip("b", 5))
SHARED = [Work((0,), (0, 1), 0.0), Work((1,), (0, 1), 1.0)]
ALONE = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]
FOREIGN = """

import random

def sample(clip, generator, inner=sample):
    values, target = inner(clip, generator)
    if clip.id == "b":
        {draw}
    return values, target
"""
RAISES = """

def sample(clip, generator, inner=sample):
    if clip.id == "b" and not torch.empty(0).is_meta:
        clip.no_such_thing
    return inner(clip, generator)
"""


@pytest.mark.parametrize("draw", ["target = target + torch.rand_like(target)", "values['time'] *= 1 + random.random()"])
def test_other_numbers_on_the_ranks_of_a_clip_are_one_message_in_its_first_step(draw: str, tmp_path: Path) -> None:
    seeds = "\n    random.seed(__import__('os').getpid()); torch.manual_seed(__import__('os').getpid())"
    more = FOREIGN.format(draw=draw).replace("):\n    values", f"):{seeds}\n    values")
    folder = executable(tmp_path / "build", [CLIPS], SHARED, 2, more=more)
    with pytest.raises(RankError, match="share clip b in step 0, and made other batches of it"):
        train_on(2, folder, steps=2)


def test_clips_that_one_rank_trains_are_not_compared_and_equal_ones_pass(tmp_path: Path) -> None:
    seeds = "\n    random.seed(__import__('os').getpid())"
    more = FOREIGN.format(draw="values['time'] *= 1 + random.random()").replace("):\n    val", f"):{seeds}\n    val")
    assert train_on(2, executable(tmp_path / "alone", [CLIPS], ALONE, 2, more=more), steps=2)["steps"]
    assert train_on(2, executable(tmp_path / "shared", [CLIPS], SHARED, 2), steps=2)["steps"]


def test_what_sample_raises_names_the_clip_and_its_path(tmp_path: Path) -> None:
    clips = (CLIPS[0], replace(CLIPS[1], path=Path("/films/b.mp4")))
    folder = executable(tmp_path / "build", [clips], ALONE, 2, more=RAISES)
    with pytest.raises(RankError, match=r"AttributeError: .*no_such_thing.* in sample\(\), of clip b \(/films/b.mp4\)"):
        train_on(2, folder, steps=1)
