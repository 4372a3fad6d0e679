"""A step, or an instruction, that never ends is ended by its own limit, and says where every rank stood."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed.executor_cases import Work, clip, executable, run

CLIPS = (clip("a", 3), clip("b", 5))
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]
STANDS_STILL = """

import os, time

def sample(clip, generator, inner=sample, calls=[]):
    calls.append(clip.id)
    if os.environ["RANK"] == "1" and len(calls) > 1:
        time.sleep(1000)
    return inner(clip, generator)
"""


def test_a_step_that_stands_still_ends_after_its_limit_and_not_after_the_starts(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2, more=STANDS_STILL)
    limits = ("--step-timeout", "2", "--start-timeout", "500")
    result = run(folder, "--steps", "3", *limits, "--report", tmp_path / "r.json", timeout=200)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error:") == 1
    assert "has been in step 1 for" in result.stderr
    assert "its limit is 2 s" in result.stderr
    assert "raise the limit with --step-timeout" in result.stderr
    assert "rank 1: step 1: forward %c1 (clip b), " in result.stderr
    assert "rank 0: step 1: " in result.stderr


def test_a_rank_that_hangs_in_a_clip_is_named_with_it_long_before_the_steps_limit(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2, more=STANDS_STILL)
    limits = ("--stall-timeout", "1", "--step-timeout", "500")
    result = run(folder, "--steps", "3", *limits, "--report", tmp_path / "r.json", timeout=200)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("error:") == 1
    assert re.search(r"rank 1 on host \S+ is silent: in step 1 it has been in forward %c1 \(clip b\)", result.stderr)
