"""What a rank's start took, part by part."""

from __future__ import annotations

import time

import pytest

from arachnec.launch.start_times import LAUNCHED, StartClock, StartTimes, note_launch, process_age


def test_parts_follow_one_another_and_add_up_to_the_whole() -> None:
    clock = StartClock()
    began = clock.since
    for part in ("reading", "plan", "weights", "plan", "first_step"):
        time.sleep(0.01)
        clock.done(part)
    ended = clock.since
    clock.done("plan")  # of the second step
    times = clock.times()
    assert times.total == pytest.approx(ended - began, abs=0.01)
    assert times.plan >= 0.02 and times.blocks == 0


def test_what_took_no_time_is_not_told() -> None:
    told = StartTimes(imports=4.21, first_step=1.0).text()
    assert told == "5.2 s from the launch to the end of the first step: imports 4.2, first step 1.0"


def test_a_process_counts_from_its_own_beginning_and_its_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    note_launch(environment)
    assert float(environment[LAUNCHED]) == pytest.approx(time.time() - process_age(), abs=0.5)
    monkeypatch.setenv(LAUNCHED, str(time.time() - process_age() - 3))
    clock = StartClock.of_process()
    clock.done("imports")
    times = clock.times()
    assert times.launcher == pytest.approx(3, abs=0.5)
    assert times.imports == pytest.approx(process_age(), abs=0.5)
