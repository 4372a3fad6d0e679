"""Windows of an order: never longer, within memory, and the best of all orders where one window is everything."""

from __future__ import annotations

import random
from itertools import product

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.csv_format import require_valid
from arachnec.pipelining.evaluate import StageTimes, Table, evaluate, held
from arachnec.pipelining.order_problem import OrderProblem
from arachnec.pipelining.order_search import list_schedule
from arachnec.pipelining.order_windows import improve_windows
from arachnec.pipelining.schedules import gpipe, one_f_one_b
from arachnec.solver.problem import Effort
from tests.pipelining.test_mixed_lengths import all_orders

ENOUGH = Effort(2_000_000)


def problem(rng: random.Random, placement: tuple[int, ...], count: int, unit: float = 1.0) -> OrderProblem:
    """Messages that take time or none; memory for little more than the longest micro-batch."""

    def table(rows: int, least: int = 1) -> Table:
        return [[rng.randint(least, 9) * unit for _ in range(count)] for _ in range(rows)]

    stages = len(placement)
    sends = (table(stages - 1, 0), table(stages - 1, 0)) if rng.random() < 0.5 else ()
    times = StageTimes(table(stages), table(stages), table(stages), None, *sends)
    saved = [[rng.randint(1, 3) for _ in range(count)] for _ in range(stages)]
    alone = [
        max(sum(saved[s][m] for s in range(stages) if placement[s] == rank) for m in range(count))
        for rank in range(1 + max(placement))
    ]
    return OrderProblem(times, saved, [most + rng.randint(0, 4) for most in alone], placement)


def fits(given: OrderProblem, schedule: PipelineSchedule) -> bool:
    return all(most <= limit for most, limit in zip(held(schedule, given.saved), given.limits, strict=True))


def makespan(given: OrderProblem, schedule: PipelineSchedule) -> float:
    """Infinite where an action stands before what it needs."""
    try:
        return evaluate(schedule, given.times).makespan
    except UserError:
        return float("inf")


@pytest.mark.parametrize("size", [4, 7, 12])
@pytest.mark.parametrize("unit", [1.0, 1 / 7])
@pytest.mark.parametrize("seed", range(4))
def test_a_bad_order_gets_no_longer_and_keeps_to_the_memory(seed: int, unit: float, size: int) -> None:
    rng = random.Random(seed)
    given = problem(rng, (0, 1, 0, 1), 3, unit)
    start = list_schedule(given, (2, 1, 0), rng.random() < 0.5)[1]
    improved = improve_windows(given, start, ENOUGH, size=size)
    require_valid(improved.schedule, 4, 3)
    assert fits(given, improved.schedule)
    assert improved.makespan == evaluate(improved.schedule, given.times).makespan
    assert improved.makespan <= evaluate(start, given.times).makespan
    assert improve_windows(given, start, ENOUGH, size=size) == improved


@pytest.mark.parametrize("unit", [1, 1 / 7])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_proved_is_the_best_of_all_orders(seed: int, unit: float) -> None:
    given = problem(random.Random(seed), (0, 1), 3, unit)
    start = list_schedule(given, (2, 1, 0), split=False)[1]
    rows = [list(all_orders(stage, 3, split=False)) for stage in (0, 1)]
    every = (PipelineSchedule(orders) for orders in product(*rows))
    least = min(makespan(given, schedule) for schedule in every if fits(given, schedule))
    improved = improve_windows(given, start, ENOUGH)
    assert improved.makespan >= least * (1 - 1e-9)
    assert not improved.optimal or improved.makespan == pytest.approx(least)
    assert improved.optimal or given.times.send_forward, "messages may queue"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_window_that_is_as_large_as_the_schedule_is_the_only_one(size: int) -> None:
    """One micro-batch there and back: two actions."""
    one = OrderProblem(StageTimes([[2]], [[3]], [[1]]), [[1]], [1], (0,))
    improved = improve_windows(one, gpipe(1, 1), Effort(100_000), size=size)
    assert (improved.schedule, improved.makespan) == (gpipe(1, 1), 6)
    assert (improved.windows, improved.proved, improved.optimal) == (1, 1, True)


@pytest.mark.parametrize("stages", [2, 3])
def test_what_is_shorter_only_without_queues_is_neither_taken_nor_is_anything_proved(stages: int) -> None:
    """One of two equal micro-batches waits for the link, and has its way there and back: no order is shorter."""
    ones, sends = [[1, 1]] * stages, [[20, 20]] * (stages - 1)
    times = StageTimes(ones, ones, ones, None, sends, sends)
    queued = OrderProblem(times, [[1, 1]] * stages, [2] * stages, tuple(range(stages)))
    schedule = one_f_one_b(stages, 2)
    improved = improve_windows(queued, schedule, Effort(1_000_000))
    assert improved.makespan == evaluate(schedule, times).makespan == 20 + 40 * (stages - 1) + 3 * stages
    assert not improved.optimal
