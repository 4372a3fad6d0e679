"""Orders for micro-batches of unequal lengths: never above the memory, never below the bound, proved by Z3."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.action import Action, Order, PipelineSchedule
from arachnec.pipelining.csv_format import require_valid
from arachnec.pipelining.evaluate import StageTimes, evaluate, held
from arachnec.pipelining.order_problem import OrderProblem, like_1f1b, lower_bound
from arachnec.pipelining.order_search import list_schedule, plan_order
from arachnec.pipelining.order_windows import improve_windows
from arachnec.pipelining.schedules import one_f_one_b
from arachnec.solver.problem import Effort

LENGTHS = st.integers(1, 12)


@st.composite
def problems(draw: st.DrawFn, most_stages: int = 4, most: int = 6) -> OrderProblem:
    """One to two stages a rank, any placement of them, any times, transfers, and memory for the longest at least."""
    ranks = draw(st.integers(1, most_stages))
    stages = draw(st.integers(ranks, 2 * ranks))
    count = draw(st.integers(1, most))
    placement = tuple(draw(st.permutations([stage % ranks for stage in range(stages)])))

    def table(rows: int, least: int = 1) -> list[list[int]]:
        return [[draw(st.integers(least, 12)) for _ in range(count)] for _ in range(rows)]

    halves = table(stages), table(stages), table(stages)
    measured = table(stages) if draw(st.booleans()) else None  # a whole backward, shorter or longer than its halves
    times = StageTimes(*halves, measured, table(stages - 1, 0), table(stages - 1, 0))
    saved = table(stages)
    alone = [
        max(sum(saved[s][m] for s in range(stages) if placement[s] == rank) for m in range(count))
        for rank in range(ranks)
    ]
    limits = [need + draw(st.integers(0, 30)) for need in alone]
    return OrderProblem(times, saved, limits, placement)


@given(problems(), st.booleans(), st.randoms())
def test_a_list_schedule_is_valid_within_memory_and_as_long_as_it_says(problem: OrderProblem, split: bool, rng) -> None:
    entry = list(range(problem.micro_batches))
    rng.shuffle(entry)
    makespan, schedule = list_schedule(problem, entry, split)
    require_valid(schedule, problem.stages, problem.micro_batches)
    assert schedule.placement == problem.placement
    assert all(most <= limit for most, limit in zip(held(schedule, problem.saved), problem.limits, strict=True))
    assert evaluate(schedule, problem.times).makespan == makespan
    assert makespan >= lower_bound(problem, split) >= lower_bound(problem, True)
    assert lower_bound(problem, True) <= lower_bound(problem, False)


def test_what_fits_on_no_rank_is_no_schedule() -> None:
    times = StageTimes([[1, 1]], [[1, 1]], [[1, 1]])
    with pytest.raises(ValueError, match="does not fit"):
        list_schedule(OrderProblem(times, [[1, 3]], [2], (0,)), [0, 1], split=True)


def all_orders(stage: int, count: int, split: bool) -> Iterator[Order]:
    kinds = "FIW" if split else "FB"
    actions = [Action(stage, kind, m) for m in range(count) for kind in kinds]
    for order in permutations(actions):
        if all(order.index(a) < order.index(b) for a, b in pairwise(actions) if a[2] == b[2]):
            yield order


def best_of_all(problem: OrderProblem, split: bool) -> float:
    best = float("inf")
    for first in all_orders(0, problem.micro_batches, split):
        for last in all_orders(1, problem.micro_batches, split):
            schedule = PipelineSchedule((first, last))
            if all(a <= b for a, b in zip(held(schedule, problem.saved), problem.limits, strict=True)):
                try:
                    best = min(best, evaluate(schedule, problem.times).makespan)
                except UserError:  # deadlocked pairs
                    continue
    return best


@settings(max_examples=8)
@given(st.lists(st.tuples(LENGTHS, LENGTHS, LENGTHS, LENGTHS), min_size=4, max_size=4), st.booleans())
def test_z3_proves_the_best_of_all_orders_and_the_bound_is_below(rows: list[tuple[int, ...]], split: bool) -> None:
    """Two stages, two micro-batches, every order of both ranks tried."""
    f, i, w, saved = ([[row[k] for row in rows[:2]], [row[k] for row in rows[2:]]] for k in range(4))
    problem = like_1f1b(StageTimes(f, i, w), saved)
    best = best_of_all(problem, split)
    assert lower_bound(problem, split) <= best
    planned = plan_order(problem, split=split, tries=20)
    start = list_schedule(problem, [0, 1], split)[1]
    windowed = improve_windows(problem, start, Effort(5_000_000))
    assert windowed.optimal
    assert windowed.makespan == best
    assert planned.makespan >= best if not split else planned.makespan >= min(best, best_of_all(problem, False))


@settings(max_examples=15)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=9), st.integers(2, 4))
def test_a_plan_never_exceeds_1f1b_in_arrival_order_in_time_or_on_any_rank_in_bytes(
    lengths: list[int], stages: int
) -> None:
    f = [[length**2 for length in lengths]] * stages
    problem = like_1f1b(StageTimes(f, f, f), [lengths] * stages)
    arrival = one_f_one_b(stages, len(lengths))
    planned = plan_order(problem, split=True, tries=30)
    assert planned.makespan <= evaluate(arrival, problem.times).makespan
    assert all(a <= b for a, b in zip(held(planned.schedule, problem.saved), held(arrival, problem.saved), strict=True))
    assert planned.makespan >= planned.bound
    again = plan_order(problem, split=True, tries=30)
    assert again == planned


def test_windows_improve_what_is_badly_ordered_and_keep_to_the_memory() -> None:
    lengths = [1, 1, 9, 1, 1, 9, 1, 1]
    f = [lengths] * 3
    problem = OrderProblem(StageTimes(f, f, f), [lengths] * 3, [20] * 3, (0, 1, 2))
    start = one_f_one_b(3, len(lengths))
    windowed = improve_windows(problem, start, Effort(300_000), size=24)
    require_valid(windowed.schedule, 3, len(lengths))
    assert windowed.makespan < evaluate(start, problem.times).makespan
    assert windowed.proved >= 1
    assert not windowed.optimal, "no window is the whole schedule"
    for size, effort in ((64, 1), (24, 300_000)):
        short = improve_windows(problem, start, Effort(effort), size=size)
        assert short.optimal == (short.windows == short.proved == 1 and size == 64)
    assert all(a <= b for a, b in zip(held(windowed.schedule, problem.saved), problem.limits, strict=True))
