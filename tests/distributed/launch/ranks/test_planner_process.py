"""A planner that was killed ends no run that needs no plan of it any more."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from arachnec.backends.torch_distributed.plans.background_planner import PLANNER, Question
from arachnec.launch.planner_process import PlannerProcess


def test_one_that_was_killed_is_asked_in_vain_and_closed_like_any_other() -> None:
    planner = PlannerProcess.of("this")
    planner.process.send_signal(signal.SIGKILL)
    planner.process.wait()
    for number in range(3):
        planner.ask(Question(number))  # it stays unwritten, and closing would write it
    assert list(planner.answers()) == []
    planner.close()
    assert planner.process.poll() is not None
    assert planner.process.stdout is not None
    planner.process.stdout.close()


def test_one_whose_rank_ended_before_it_began_says_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", PLANNER, str(tmp_path / "gone"), "1"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
