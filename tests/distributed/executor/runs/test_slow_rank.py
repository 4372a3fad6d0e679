"""A rank that becomes slow gets less work, and as much as the others when it is not any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.reporting import report
from arachnec.runtime.step_progress import Interval
from tests.distributed.executor_cases import QUICK, Work, clip, executable, train
from tests.distributed.harness import run_ranks

CLIPS = [clip(number, 5) for number in range(6)]
SLOW_STEPS = 8
STEPS = 20  # as fast again, a rank has to be so in 8 steps, and the third step after them has the other plan
FORWARD_MS = 30.0
SINGLE = QUICK.replace("policy=dual", "policy=single")  # short clips would share forwards


def train_with_a_slow_rank(folder: Path) -> list[int]:
    """How many forwards this rank had in each step. Its clock is another: a forward takes as long as is said here, and
    five times that on rank 1 at first."""
    forwards: list[int] = []

    def busy_ms(intervals: Sequence[Interval]) -> float:
        forwards.append(sum(interval.op == "forward" for interval in intervals))
        slow = dist.get_rank() == 1 and len(forwards) <= SLOW_STEPS
        return forwards[-1] * FORWARD_MS * (5 if slow else 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "busy_ms", busy_ms)
        train(folder, RunOptions(steps=STEPS))
    return forwards


def test_a_slow_rank_gets_less_work_and_all_of_it_again(tmp_path: Path) -> None:
    works = [Work((number,), (number % 2,), float(number // 2)) for number in range(6)]
    folder = executable(tmp_path / "b", [CLIPS], works, 2, pipeline=SINGLE)
    other, slow = run_ranks(2, train_with_a_slow_rank, folder)
    assert [a + b for a, b in zip(other, slow, strict=True)] == [6] * STEPS
    assert slow[:5] == [3] * 5
    assert set(slow[6 : SLOW_STEPS + 1]) == {1}  # 3 forwards as slow as 5 of the others' would be the longest by far
    assert slow[SLOW_STEPS + 8] == 1, list(slow)  # not before 8 steps have shown it
    assert slow[-1] == 3, list(slow)
