"""Ctrl-C and SIGTERM end a run after the step under way, with a checkpoint from which it goes on to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from arachnec.checkpoint.folder import committed, read_commit
from arachnec.launch.ending import AGAIN_S, StopRequest
from tests.distributed.executor.runs.test_audit_log import BATCHES, WORKS
from tests.distributed.executor_cases import RUNS, executable, train_on
from tests.warm_python import warm_python

ENDS_S = 120.0
SLOWLY = """

import os, time
from pathlib import Path

def sample(clip, generator, inner=sample):
    with open({place!r}, "a") as file:
        print(os.environ.get("RANK"), os.getpid(), file=file)
    time.sleep(0.02)
    return inner(clip, generator)
"""


def begun(place: Path, process: subprocess.Popen[str]) -> list[list[str]]:
    """The rank and the process of every clip that was drawn, once there are some."""
    until = time.monotonic() + ENDS_S
    while not place.exists() or len(place.read_text().splitlines()) < 12:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    return [line.split() for line in place.read_text().splitlines()]


def steps_kept(kept: Path) -> int:
    commit = read_commit(committed(kept)[0])
    assert commit is not None
    return commit.position.steps


def started(words: list[str], **more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(
        [warm_python(RUNS), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_an_interrupted_launcher_leaves_a_checkpoint_of_a_whole_step_that_goes_on_to_the_end(tmp_path: Path) -> None:
    place, kept = tmp_path / "seen", tmp_path / "kept"
    folder = executable(tmp_path / "build", BATCHES, WORKS, 2, more=SLOWLY.format(place=str(place)))
    options = ["--no-equivalence", "--checkpoint", str(kept)]
    with started(["-m", "arachnec.cli", "run", str(folder), "--steps", "5000", *options]) as run:
        begun(place, run)
        run.send_signal(signal.SIGINT)
        told, error = run.communicate(timeout=ENDS_S)
    assert run.returncode == 128 + signal.SIGINT, told + error
    assert "Traceback" not in told + error
    done = steps_kept(kept)
    assert 1 <= done < 5000
    assert "of grace" in told and "ends after the step under way" in told
    assert f"ended by a signal after {done} step" in told
    assert f"--resume goes on from the checkpoint in {kept}" in told.replace("\n", "")
    report = train_on(2, folder, steps=done + 2, checkpoint=kept, resume=True)
    assert [step["step"] for step in report["steps"]] == [done, done + 1]
    with started(["-m", "arachnec.cli", "run", str(folder), "--resume", "--steps", str(done), *options]) as again:
        told, error = again.communicate(timeout=ENDS_S)
    assert (again.returncode, "were done before" in told) == (0, True), told + error


def test_a_rank_under_torchrun_that_is_told_to_end_takes_all_to_the_same_step(tmp_path: Path) -> None:
    place, kept = tmp_path / "seen", tmp_path / "kept"
    folder = executable(tmp_path / "build", BATCHES, WORKS, 2, more=SLOWLY.format(place=str(place)))
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    worker = ["-m", "arachnec.backends.torch_distributed.worker", str(folder), "--steps", "5000"]
    with started([*words, *worker, "--checkpoint", str(kept)]) as run:
        ranks = dict(begun(place, run))
        os.kill(int(ranks["1"]), signal.SIGTERM)
        told, error = run.communicate(timeout=ENDS_S)
    assert run.returncode, told
    done = steps_kept(kept)
    assert 1 <= done < 5000
    assert f"ended by a signal after {done} step" in told
    assert "was told to end" not in error


SCRIPT = """
import os, signal, time
from arachnec.launch.ranks import joined_rank
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
with joined_rank(30) as joined:
    try:
        {before}
        os.kill(os.getpid(), signal.SIGINT)
        {between}
        time.sleep(20)
    except KeyboardInterrupt:
        print("caught", flush=True)
    time.sleep(2)
    print("exported", flush=True)
"""


@pytest.mark.parametrize(
    ("before", "between"),
    [
        ("", ""),
        ("joined.watchdog.stops_after_step(); joined.watchdog.stops_at_once(acted=False)", ""),
        ("joined.watchdog.stops_after_step()", "time.sleep(1); joined.watchdog.stops_at_once(acted=False)"),
    ],
    ids=["without a loop", "behind its loop", "when its loop ends"],
)
def test_a_script_of_ones_own_catches_ctrl_c_and_goes_on(before: str, between: str) -> None:
    with started(["-c", SCRIPT.format(before=before, between=between)]) as script:
        told, error = script.communicate(timeout=ENDS_S)
    assert (script.returncode, told.split()) == (0, ["caught", "exported"]), told + error


def test_a_second_signal_asks_to_end_at_once_and_one_told_twice_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    request = StopRequest()
    assert request.take({signal.SIGTERM})
    now += AGAIN_S / 2
    assert request.take({signal.SIGINT, signal.SIGTERM})
    assert request.signum == signal.SIGTERM
    now += AGAIN_S
    assert not request.take({signal.SIGINT})
