"""A rank of a pipeline with a fixed order of stages becomes slow: it is named, and its work stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.runtime.step_progress import Interval
from tests.distributed.executor_cases import clip, train
from tests.distributed.harness import run_ranks
from tests.distributed.pipeline_cases import executable, pipeline_of

CLIPS = [clip(number, 3) for number in range(4)]
STEPS = 9  # in the fifth a rank counts as slow, and the second after it has the plan for that
FORWARD_MS = 30.0


def train_with_a_slow_stage(folder: Path) -> tuple[list[list[str]], list[str]]:
    """What this rank did in each step, and what rank 0 noted. Of the first stage's rank 0 every forward takes as long
    as is said here, of rank 1 five times that."""
    done: list[list[str]] = []
    notes: list[str] = []

    def busy_ms(intervals: Sequence[Interval]) -> float:
        done.append([interval.op for interval in intervals if interval.op in ("forward", "backward")])
        return len(CLIPS) * FORWARD_MS * (5 if dist.get_rank() == 1 else 1)

    def emit(event: report.Event) -> None:
        notes.extend([event.text] if isinstance(event, report.Note) else [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "busy_ms", busy_ms)
        patch.setattr(events, "emit", emit)
        train(folder, RunOptions(steps=STEPS))
    return done, notes


def test_a_slow_rank_of_a_fixed_pipeline_is_named_and_keeps_its_work(tmp_path: Path) -> None:
    passes = pipeline_of("p=2", "schedule=1f1b")
    folder = executable(tmp_path / "b", 2, [CLIPS], passes)
    for done, notes in run_ranks(2, train_with_a_slow_stage, folder):
        assert len(done) == STEPS
        assert all(step == done[0] for step in done)
        assert sum("rank 1 computes 5.0 times as slowly as the others" in note for note in notes) == 1, notes
