"""A loop of one's own as a script under torchrun: it trains to its end, and ends as it should where it breaks."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from arachnec.checkpoint.folder import committed, read_commit
from tests.distributed.executor_cases import MODEL, RUNS
from tests.slow import quick
from tests.warm_python import warm_python

# One script, whose dataset ends as it should, early, or with another shape than it announced.
SCRIPT = """
import sys
import torch
import arachnec
from arachnec.passes.infra.named_pipelines import PIPELINES

how, kept = sys.argv[1:]


class Clips:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and how == "ends":
            raise IndexError(index)
        frames = 3 + index % 2
        tensor = torch.zeros(1, frames) if not (index == 5 and how == "shape") else torch.zeros(2, frames)
        return {"id": index, "frames": frames, "height": 16, "width": 16, "text_tokens": 0, "tensor": tensor}


engine = arachnec.Engine(
    "model.py", Clips(), batch=2, passes=PIPELINES["default"].replace("schedule-z3", "schedule-z3{steps=20}"),
    checkpoint=kept, every=100,
)
for step in engine:
    # One write with its end of line: what `print` writes in two parts, the other rank may cut in two.
    sys.stdout.write(f"rank {torch.distributed.get_rank()} step {step.number} loss {step.loss:.6f}\\n")
    sys.stdout.flush()
    if how == "raises" and step.number == 1:
        raise KeyError("mine")
"""


def started(folder: Path, how: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """What torchrun printed, and the steps that a checkpoint holds."""
    (folder / "model.py").write_text(MODEL)
    (folder / "own.py").write_text(textwrap.dedent(SCRIPT))
    torchrun = [warm_python(RUNS), "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    torchrun += ["--monitor-interval=2"]  # time for every rank to end by itself before torchrun ends it
    (folder / "tmp").mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    result = subprocess.run(
        [*torchrun, "own.py", how, "kept"], cwd=folder, capture_output=True, text=True, timeout=200, env=environment
    )
    assert list((folder / "tmp").glob("arachnec-rank-*")) == []  # however it ended
    commits = [read_commit(path) for path in committed(folder / "kept")]
    return result, max((commit.position.steps for commit in commits if commit is not None), default=0)


def test_a_script_under_torchrun_trains_to_its_end(tmp_path: Path) -> None:
    result, steps = started(tmp_path, "right")
    assert result.returncode == 0, result.stderr
    told = [line.split() for line in result.stdout.splitlines() if line.startswith("rank ")]
    losses = [{line[5] for line in told if line[3] == str(step)} for step in range(4)]
    assert len(told) == 8
    assert [len(alike) for alike in losses] == [1] * 4  # both ranks have the same
    assert steps == 4


BROKEN = {
    "ends": "error: the dataset announced 8 items and ended after 5 items",
    "shape": "error: clip `5` announces 4 x 16 x 16 and its `tensor` is 2 x 4",
}


@pytest.mark.parametrize("how", quick(list(BROKEN), "ends"))
def test_a_dataset_that_breaks_is_one_message_and_nothing_trained_is_lost(how: str, tmp_path: Path) -> None:
    result, steps = started(tmp_path, how)
    assert result.returncode == 1  # torchrun's own, whatever its ranks end with
    own, _, torchruns = result.stderr.partition("own.py FAILED")
    assert result.stderr.count("error: ") == 1
    assert BROKEN[how] in own
    assert "arachnec/" not in own  # no traceback of ours
    assert torchruns.count("exitcode  : 2") == 2
    assert steps == 2


def test_an_exception_of_the_loop_itself_shows_its_own_traceback_and_ends_all_ranks(tmp_path: Path) -> None:
    result, _ = started(tmp_path, "raises")
    assert result.returncode == 1
    assert "KeyError: 'mine'" in result.stderr
