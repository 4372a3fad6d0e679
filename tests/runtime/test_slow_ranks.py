"""A rank that stays slow is planned for, by how much; a slow step, a slow machine or one slow by turns is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from arachnec.runtime.replanning import IDLE, STEPS, SlowRanks, factors

PLANNED = [10.0, 20.0, 10.0, 0.0]
EVEN = [50.0, 100.0, 50.0, 0.0]
SLOW = [50.0, 500.0, 50.0, 0.0]  # rank 1, by 5


def planned_after(steps: Sequence[list[float]], watch: SlowRanks | None = None) -> SlowRanks:
    """Every step is planned with what was known before it; its times grow with that."""
    watch = watch or SlowRanks()
    for measured in steps:
        counted = dict(watch.planned)
        times = [ms * counted.get(rank, 1.0) for rank, ms in enumerate(PLANNED)]
        watch = watch.after(times, measured, counted)
    return watch


def test_a_rank_is_measured_against_its_plan_and_the_others() -> None:
    assert factors(PLANNED, [30.0, 300.0, 30.0, 0.0]) == {
        0: pytest.approx(0.333, abs=1e-2),
        1: 5.0,
        2: pytest.approx(0.333, abs=1e-2),
    }
    assert factors([10.0], [50.0]) == {}  # of one rank nothing is known


def test_a_slowdown_that_lasts_is_planned_for_and_forgotten_when_it_is_over() -> None:
    assert planned_after([SLOW] * (STEPS - 1)).planned == {}
    slow = planned_after([SLOW] * STEPS)
    assert slow.planned == {1: pytest.approx(5.0)}
    assert planned_after([SLOW] * 50, slow).planned == slow.planned
    assert planned_after([EVEN] * (2 * STEPS - 1), slow).planned == slow.planned
    assert planned_after([EVEN] * 2 * STEPS, slow).planned == {}


def test_one_slow_step_is_nothing_and_nor_are_milliseconds() -> None:
    assert planned_after([*[SLOW] * (STEPS - 1), EVEN, *[SLOW] * (STEPS - 1)]).planned == {}
    assert planned_after([[1.0, 10.0, 1.0, 0.0]] * 9).planned == {}
    assert planned_after([EVEN] * 9).planned == {}


def test_a_rank_that_is_slow_by_turns_has_plans_changed_ever_more_rarely() -> None:
    watch, changes, turn = SlowRanks(), 0, [SLOW] * 8 + [EVEN] * 8
    for measured in turn * 40:
        before = watch.planned
        watch = planned_after([measured], watch)
        changes += watch.planned != before
    assert changes <= 3


def test_a_slow_rank_that_gets_no_work_is_tried_again() -> None:
    watch = planned_after([SLOW] * STEPS)
    idle, measured = [10.0, 0.0, 10.0, 0.0], [50.0, 0.0, 50.0, 0.0]
    for _ in range(2 * STEPS * IDLE):
        assert watch.planned
        watch = watch.after(idle, measured, watch.planned)
    assert watch.planned == {}


def test_a_slowdown_that_changes_is_followed() -> None:
    slower = [50.0, 1000.0, 50.0, 0.0]
    assert planned_after([SLOW] * STEPS + [slower] * 2 * STEPS).planned == {1: pytest.approx(10.0)}


def test_a_slow_rank_with_little_left_to_do_is_not_called_slower_still() -> None:
    """What launching costs stays, however little work a rank gets."""
    watch = planned_after([SLOW] * STEPS)
    for _ in range(100):
        watch = watch.after([10.0, 1.0, 10.0, 0.0], [50.0, 40.0, 50.0, 0.0], watch.planned)
    assert watch.planned == {1: pytest.approx(5.0)}
