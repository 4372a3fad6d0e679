"""What a rank's start took, part by part."""

from __future__ import annotations

import time

import pytest

from arachnec.launch.start_times import (
    IMPORTS,
    LAUNCHED,
    StartClock,
    StartTimes,
    note_imports,
    note_launch,
    process_age,
)


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


def test_a_fork_counts_from_the_beginning_of_the_process_that_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    note_imports(environment)
    assert float(environment[IMPORTS]) == pytest.approx(time.time() - process_age(), abs=0.5)
    monkeypatch.setenv(IMPORTS, str(time.time() - 7))
    monkeypatch.setenv(LAUNCHED, str(time.time() - 9))
    clock = StartClock.of_process()
    clock.done("imports")
    times = clock.times()
    assert times.launcher == pytest.approx(2, abs=0.5)
    assert times.imports == pytest.approx(7, abs=0.5)
