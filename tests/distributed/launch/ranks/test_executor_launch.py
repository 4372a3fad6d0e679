"""Starting ranks, planning their steps in the background, and what a person reads when one of them fails."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from arachnec import cli
from arachnec.backends.torch_distributed.local_run import run_here
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans import step_plans
from arachnec.backends.torch_distributed.plans.background_planner import BackgroundPlanner, Question
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_file
from arachnec.runtime.agreement import agree
from tests.distributed.executor_cases import (
    RUNS,
    Work,
    assert_same_gradients,
    clip,
    executable,
    losses,
    plain_loop,
    run,
)
from tests.distributed.harness import RankError, run_ranks
from tests.warm_python import warm_python

CLIPS = (clip("a", 3), clip("b", 5))
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]
DIES = """

import os, signal

def sample(clip, generator, inner=sample):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(clip, generator)
"""
RAISES = """

def loss(prediction, target):
    return prediction.no_such_thing()
"""
BROKEN_LAYER = """

import torch
from torch import nn

def build(inner=build):
    model = inner()
    def refuse(*_):
        raise RuntimeError("this layer is broken")
    model.head.register_forward_pre_hook(refuse)
    return model
"""
BUGGY = """

import arachnec.backends.torch_distributed.run.training_run as run
run.run_iteration = None  # a bug of the executor: no line of this file raises
"""


def test_every_step_has_its_own_clips_and_plan_on_another_number_of_ranks(tmp_path: Path) -> None:
    batches = [CLIPS, (clip("c", 7), clip("d", 1), clip("e", 3)), (clip("f", 9),)]
    folder = executable(tmp_path / "build", batches, WORKS, 3, training=Training(lr=0.0))
    result = run(
        folder, "--ranks", "2", "--steps", "5", "--report", tmp_path / "r.json", "--save-gradients", tmp_path / "g"
    )
    assert result.returncode == 0, result.stderr
    run_losses = losses(tmp_path / "r.json")
    for step in range(5):
        loss, gradients = plain_loop(folder, batches[step % 3], step=step)
        assert abs(run_losses[step] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(tmp_path / "g", gradients)
    steps = msgspec.json.decode((tmp_path / "r.json").read_bytes())["steps"]
    assert [step["iteration"] for step in steps] == [0, 1, 2, 0, 1]
    assert (folder / "measured.svg").read_text().startswith("<svg")
    # What is left to be looked at is the last step, with its own plan.
    assert msgspec.json.decode((folder / "measured.json").read_bytes())["iteration"] == 1
    measured = parse_file(folder / "measured.cascade")
    assert (measured.name, len(measured.programs)) == ("iteration_1", 2)
    assert "measured, step 4 of iteration 1" in (folder / "timeline.html").read_text(encoding="utf-8")


def test_a_plan_is_asked_for_ahead_waited_for_once_and_kept_where_it_recurs(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", [CLIPS, CLIPS[:1], CLIPS[1:]], WORKS, 3)
    (events,) = run_ranks(1, _planner_events, folder)
    assert all(events.index(f"ask {number}") < events.index(f"fetch {number}") for number in range(3))
    assert [event for event in events if event.startswith("fetch")] == ["fetch 0", "fetch 1", "fetch 2"]


def _planner_events(folder: Path) -> list[str]:
    """What five steps over three iterations want of the planning process, on one rank that the plan is not for."""
    events: list[str] = []

    class Noted(BackgroundPlanner):
        def ask(self, question: Question) -> None:
            events.append(f"ask {question.iteration}")
            super().ask(question)

        def fetch(self, question: Question) -> str:
            events.append(f"fetch {question.iteration}")
            return super().fetch(question)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plans, "BackgroundPlanner", Noted)
        kept = step_plans.Plans(read_executable(folder), 0, 1)
        for number in (0, 1, 2, 0, 1):
            planned = kept.get(number)
            assert planned is not None
            assert planned.module.name == f"iteration_{number}"
            kept.prepare((number + 1) % 3)
        kept.close()
    return events


def test_a_killed_rank_gives_one_message_and_takes_the_others_down(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2, more=DIES)
    monkeypatch.setattr(sys, "executable", warm_python(RUNS))
    assert cli.run(["run", str(folder)]) == 2
    said = capfd.readouterr().err  # of the ranks too
    assert said.count("error:") == 1
    assert "rank 1 of 2 was killed by SIGKILL; the others were stopped; it was in step 0: " in said
    assert "(clip b)" in said
    assert "Traceback" not in said


def test_the_check_of_the_launcher_is_made_while_ranks_start_and_what_it_finds_leaves_nothing_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2)
    monkeypatch.setattr(sys, "executable", warm_python(RUNS))
    kept = tmp_path / "kept"
    options = RunOptions(steps=1, checkpoint=kept)

    def finds_something(program: Module) -> str:
        raise user_error("the program computes something else")

    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match="the program computes something else"):
        run_here(folder, 2, options, finds_something)
    assert sorted(folder.iterdir()) == before
    assert not kept.exists()
    assert "error" not in capfd.readouterr().err

    run_here(folder, 2, options, lambda program: f"{len(program.clips)} clips computed on small tensors")
    told = capfd.readouterr().out
    assert told.index("2 clips computed on small tensors") < told.index("1 step from step 0 on")
    start = msgspec.json.decode((folder / "run.json").read_bytes())["start"]
    assert f"{sum(start.values()):.1f} s from the launch to the end of the first step: " in told
    assert min(start[part] for part in ("imports", "group", "reading", "weights", "first_step")) > 0
    assert start["launcher"] == 0  # no command began: this process is a test


@pytest.mark.parametrize(
    ("more", "code", "expected", "traceback"),
    [
        pytest.param(RAISES, 2, "no_such_thing", False, id="users-mistake"),
        pytest.param(BROKEN_LAYER, 2, "this layer is broken", False, id="users-layer"),
        pytest.param(BUGGY, 1, "not callable", True, id="anything-else"),
    ],
)
def test_an_exception_on_the_ranks_is_told_once(
    tmp_path: Path, more: str, code: int, expected: str, traceback: bool
) -> None:
    result = run(executable(tmp_path / "build", [CLIPS], WORKS, 2, more=more))
    assert result.returncode == code
    assert expected in result.stderr
    assert result.stderr.count("Traceback") == int(traceback)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "3"], "cannot be made again for 3"),
        (["--lr", "-1"], "lr = -1.0 cannot be trained with"),
        (["--ema", "1.5"], "ema = 1.5"),
        (["--resume"], "--resume needs the folder of the checkpoints"),
    ],
)
def test_a_wrong_option_is_one_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2)
    assert cli.run(["run", str(folder), *arguments]) == 2
    said = capfd.readouterr().err
    assert expected in said
    assert "Traceback" not in said


def test_torchrun_starts_the_worker_by_hand(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", [CLIPS], WORKS, 2)
    torchrun = [warm_python(RUNS), "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    worker = ["--rdzv-endpoint=localhost:0", "-m", "arachnec.backends.torch_distributed.worker", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run([*torchrun, *worker], capture_output=True, text=True, timeout=120, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\nstep ") == 1
    loss, _ = plain_loop(folder, CLIPS)
    assert abs(losses(folder / "run.json")[0] - loss) <= 1e-6 * abs(loss)


def _agree(by_rank: list[dict[str, str]]) -> None:
    digests = by_rank[torch.distributed.get_rank()]
    agree({name: hashlib.sha256(text.encode()).hexdigest() for name, text in digests.items()})


def test_ranks_that_differ_in_a_part_say_which(tmp_path: Path) -> None:
    modules = {f"module_{number}.py": "d" for number in range(256)}
    same = {"clips.jsonl": "a", "model.py": "b", "versions": "c", **modules}
    run_ranks(2, _agree, [same, same])
    with pytest.raises(RankError, match=r"rank 1 and rank 0 differ in model\.py"):
        run_ranks(2, _agree, [same, same | {"model.py": "other"}])
    with pytest.raises(RankError, match=r"rank 1 and rank 0 differ in more\.py"):
        run_ranks(2, _agree, [same, same | {"more.py": "other"}])


def test_ranks_with_other_options_say_which() -> None:
    own, other = RunOptions(steps=2).shared(), RunOptions(steps=4).shared()
    assert [name for name in own if own[name] != other[name]] == ["the option --steps"]
    assert RunOptions(max_skipped=3).shared()["the option --max-skipped"] == 3
