"""Under torchrun a job whose rank is killed goes on from its newest checkpoint, to where it was to end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from arachnec.backends.torch_distributed.checkpoints.initial_run import end_of_job
from tests.distributed.executor.runs.test_audit_log import BATCHES, WORKS, demand_every_clip_once, epochs
from tests.distributed.executor_cases import RUNS, executable, train_on
from tests.distributed.harness import run_ranks
from tests.warm_python import warm_python

# In its first start the rank that has clip d is killed in the third epoch.
KILLED = """

import os, signal

def sample(clip, generator, inner=sample, seen=[]):
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and clip.id == "d":
        seen.append(clip.id)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return inner(clip, generator)
"""


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", BATCHES, WORKS, 2, more=KILLED)
    kept = tmp_path / "kept"
    torchrun = [warm_python(RUNS), "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=a-job"]
    worker = ["-m", "arachnec.backends.torch_distributed.worker", str(folder), "--steps", "9"]
    saving = ["--checkpoint", str(kept), "--every", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*torchrun, *where, *worker, *saving], capture_output=True, text=True, timeout=200, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert "was killed or crashed: its process is gone" in result.stderr
    steps = msgspec.json.decode((folder / "run.json").read_bytes())["steps"]
    assert 2 <= steps[0]["step"] <= 7 and steps[-1]["step"] == 8
    undisturbed = train_on(2, folder, steps=9, report=tmp_path / "undisturbed.json")["steps"]
    for step in steps:
        assert step["loss"] == pytest.approx(undisturbed[step["step"]]["loss"], rel=1e-6)
    assert len(epochs(kept)) == 3
    for lines in epochs(kept):
        demand_every_clip_once(lines)


ONE_PASS = 7


def ends(folder: Path, *starts: tuple[int, int | None, bool, str]) -> list[int | None]:
    restarts = []
    for done, asked, restarted, name in starts:
        os.environ["TORCHELASTIC_RUN_ID"] = name
        restarts.append(end_of_job(folder, done, asked, ONE_PASS, restarted=restarted))
    del os.environ["TORCHELASTIC_RUN_ID"]
    return restarts


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        pytest.param([(0, 9, False, "a"), (4, 13, True, "a"), (6, 15, True, "a")], [9, 9, 9], id="restarts"),
        pytest.param([(0, 9, False, "a"), (9, 18, True, "a")], [9, 9], id="killed-behind-the-last-step"),
        pytest.param([(0, 9, False, "a"), (9, 14, False, "b")], [9, 14], id="the-next-job"),
        pytest.param([(0, 9, False, "a"), (9, 14, True, "b")], [9, 14], id="killed-before-it-said-where-it-ends"),
        pytest.param([(0, None, False, "a"), (3, None, False, "b")], [ONE_PASS, ONE_PASS], id="a-pass-resumed"),
        pytest.param([(0, 20, False, "a"), (3, None, False, "b")], [20, 20], id="goes-on-to-what-was-asked-for"),
        pytest.param([(0, 5, False, "a"), (5, None, False, "b")], [5, ONE_PASS], id="a-pass-after-a-few-steps"),
        pytest.param([(0, 20, False, "a"), (0, None, False, "b")], [20, ONE_PASS], id="begun-anew"),
    ],
)
def test_a_job_ends_where_its_first_start_aimed(
    starts: list[tuple[int, int | None, bool, str]], expected: list[int], tmp_path: Path
) -> None:
    assert run_ranks(2, ends, tmp_path, *starts) == [expected, expected]
