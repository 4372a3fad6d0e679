"""A rank that stays slow is told once, by how much; a slow step or a slow machine is not."""

from __future__ import annotations

import pytest

from arachnec.runtime.slow_ranks import STEPS, SlowRanks, factors

PLANNED = [10.0, 20.0, 10.0, 0.0]


def told(*steps: list[float]) -> list[dict[int, float]]:
    watch, told = SlowRanks(), []
    for measured in steps:
        watch, now = watch.after(PLANNED, measured)
        told.append(now)
    return told


def test_a_rank_is_measured_against_its_plan_and_the_others() -> None:
    assert factors(PLANNED, [30.0, 300.0, 30.0, 0.0]) == {
        0: pytest.approx(0.333, abs=1e-2),
        1: 5.0,
        2: pytest.approx(0.333, abs=1e-2),
    }
    assert factors([10.0], [50.0]) == {}  # of one rank nothing is known


def test_it_is_told_once_it_lasts_and_again_when_it_comes_back() -> None:
    slow, even = [10.0, 100.0, 10.0, 0.0], [50.0, 100.0, 50.0, 0.0]
    assert told(*[slow] * (STEPS + 2)) == [*[{}] * (STEPS - 1), {1: 5.0}, {}, {}]
    assert told(*[slow] * (STEPS - 1), even, *[slow] * STEPS)[-1] == {1: 5.0}
    assert told(*[even] * 9) == [{}] * 9


def test_one_slow_step_is_nothing_and_nor_are_milliseconds() -> None:
    assert told([10.0, 100.0, 10.0, 0.0], *[[10.0, 20.0, 10.0, 0.0]] * 9) == [{}] * 10
    assert told(*[[1.0, 10.0, 1.0, 0.0]] * 9) == [{}] * 9
