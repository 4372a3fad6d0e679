"""What a window of an order knows of what lies around it, and the whole numbers that its solver is given."""

from __future__ import annotations

import random
from functools import cache

import pytest
import z3

from arachnec.pipelining.action import Action
from arachnec.pipelining.evaluate import StageTimes, Table, evaluate
from arachnec.pipelining.list_schedule import list_schedule
from arachnec.pipelining.order_windows import TICKS, _Model, _whole
from arachnec.pipelining.problem import OrderProblem

STAGES, COUNT = 4, 3


def problem(seed: int) -> OrderProblem:
    """Two stages a rank, messages that take time or none."""
    rng = random.Random(seed)

    def table(rows: int, least: int = 1) -> Table:
        return [[rng.randint(least, 9) for _ in range(COUNT)] for _ in range(rows)]

    halves = table(STAGES), table(STAGES), table(STAGES)
    times = StageTimes(*halves, None, table(STAGES - 1, 0), table(STAGES - 1, 0))
    return OrderProblem(times, [[1] * COUNT] * STAGES, [STAGES * COUNT] * 2, (0, 1, 0, 1))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_in_a_window_of_everything_only_what_an_action_needs_and_what_needs_it_bounds_it(
    seed: int, split: bool
) -> None:
    given = problem(seed)
    schedule = list_schedule(given, range(COUNT), split)[1]
    model = _Model(
        given, schedule, evaluate(schedule, given.times), [range(len(order)) for order in schedule.orders], z3.Solver()
    )
    actions = [action for order in schedule.orders for action in order]

    @cache
    def head(action: Action) -> float:
        needed, delay = model._needed(action)
        return head(needed) + model._length(needed) + delay if needed in actions else 0

    @cache
    def tail(action: Action) -> float:
        needing = [(other, model._needed(other)) for other in actions]
        behind = [delay + model._length(other) + tail(other) for other, (own, delay) in needing if own == action]
        return max(behind, default=0)

    assert model.heads == {action: head(action) for action in actions}
    assert model.tails == {action: tail(action) for action in actions}
    assert max(model.tails.values()) > 0


def test_in_ticks_an_action_takes_one_at_least_and_a_message_may_take_none() -> None:
    times = StageTimes([[1.5, 1e-9]] * 2, [[1.0, 1.0]] * 2, [[0.0, 1.0]] * 2, None, [[0.0, 0.25]], [[1e-9, 0.0]])
    whole = _whole(OrderProblem(times, [[1.5, 1.0]] * 2, [2.5, 3.0], (0, 1)), 10.0)
    assert whole.times.forward == [[1.5 * TICKS / 10, 1]] * 2
    assert whole.times.weight_gradient == [[1, TICKS / 10]] * 2
    assert (whole.times.send_forward, whole.times.send_backward) == ([[0, 0.25 * TICKS / 10]], [[0, 0]])
    assert (whole.saved, whole.limits) == ([[2, 1]] * 2, [2, 3])
