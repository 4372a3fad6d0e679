"""What a window of an order knows of what lies around it, and the whole numbers that its solver is given."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations, permutations, product

import pytest
import z3

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.action import Action, PipelineSchedule
from arachnec.pipelining.evaluate import StageTimes, Table, evaluate
from arachnec.pipelining.held import held
from arachnec.pipelining.list_schedule import list_schedule
from arachnec.pipelining.one_f_one_b import gpipe, one_f_one_b
from arachnec.pipelining.order_windows import TICKS, _Model, _whole, _window, improve_windows
from arachnec.pipelining.problem import OrderProblem
from arachnec.solver.problem import Effort

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


@pytest.mark.parametrize("table", range(6))
def test_whole_numbers_are_taken_as_they_are_unless_one_time_is_not_whole_or_no_action_takes_none(table: int) -> None:
    """A message may take none. Two stages; of the six tables one has another number in one place."""
    for other in (5, 0, 1, 2.5):
        tables: list[list[list[float]]] = [[[2, 3] for _ in range(2 if k < 4 else 1)] for k in range(6)]
        tables[table][0][1] = other
        whole = _whole(OrderProblem(StageTimes(*tables), [[1, 1]] * 2, [2, 2], (0, 1)), 10).times
        now = whole.forward, whole.activation_gradient, whole.weight_gradient, whole.backward
        scaled = [[[time * TICKS / 10 for time in row] for row in rows] for rows in tables]
        if table < 4 and other == 0:
            scaled[table][0][1] = 1
        kept = other in (1, 5) or (table >= 4 and other == 0)
        assert [*now, whole.send_forward, whole.send_backward] == (tables if kept else scaled)


def windowed(seed: int, size: int, room: int) -> tuple[OrderProblem, PipelineSchedule, _Model, z3.Solver]:
    """A window of a bad order, messages free, some memory on a rank beyond what the order takes."""
    rng = random.Random(seed)
    plain, split = problem(seed), rng.random() < 0.5
    times = StageTimes(plain.times.forward, plain.times.activation_gradient, plain.times.weight_gradient)
    saved = [[rng.randint(1, 3) for _ in range(COUNT)] for _ in range(STAGES)]
    free = OrderProblem(times, saved, plain.limits, plain.placement)
    entry = rng.sample(range(COUNT), COUNT)
    tight = [sum(map(sum, saved)) * own // 8 for own in (rng.randint(5, 8), rng.randint(5, 8))]
    schedule = list_schedule(OrderProblem(times, saved, [99, 99], plain.placement), entry, split)[1]
    limits = [max(most, limit) + room for most, limit in zip(held(schedule, saved), tight, strict=True)]
    given = OrderProblem(free.times, saved, limits, plain.placement)
    evaluation = evaluate(schedule, times)
    first = rng.randint(0, sum(map(len, schedule.orders)) - size)
    solver = z3.Solver()
    return (
        given,
        schedule,
        _Model(given, schedule, evaluation, _window(schedule, evaluation, first, size), solver),
        solver,
    )


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("seed", range(16))
def test_a_window_has_an_answer_exactly_where_one_of_all_its_orders_is_shorter(seed: int, room: int) -> None:
    given, schedule, model, solver = windowed(seed, 7, room)
    before = evaluate(schedule, given.times).makespan

    def makespan(*inside: tuple[Action, ...]) -> float:
        orders = [
            (*order[: own.start], *new, *order[own.stop :])
            for order, own, new in zip(schedule.orders, model.window, inside, strict=True)
        ]
        changed = PipelineSchedule(tuple(orders))
        if any(most > limit for most, limit in zip(held(changed, given.saved), given.limits, strict=True)):
            return before
        try:
            return evaluate(changed, given.times).makespan
        except UserError:  # something before what it needs
            return before

    shortest = min(makespan(*inside) for inside in product(*map(permutations, model.inside)))
    assert (solver.check() == z3.sat) == (shortest < before)


@pytest.mark.parametrize("seed", range(8))
def test_of_two_actions_the_order_is_fixed_where_the_other_one_ends_too_late_or_breaks_a_micro_batch(seed: int) -> None:
    _, _, model, solver = windowed(seed, 9, 3)
    fixed = set()
    for a, b in (pair for own in model.inside for pair in combinations(own, 2)):
        for first, last, holds in ((a, b, f"(not |{a}<{b}|)"), (b, a, f"|{a}<{b}|")):
            both = model._length(first) + model._length(last)
            alike = (first.stage, first.micro_batch) == (last.stage, last.micro_batch)
            if model.heads[first] + both + model.tails[last] > model.horizon or (alike and first == b):
                fixed.add(holds)
    asked = {one.sexpr() for one in solver.assertions()}
    assert fixed == {one for one in asked if one.startswith(("|", "(not |"))}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_window_that_is_as_large_as_the_schedule_is_the_only_one(size: int) -> None:
    """One micro-batch there and back: two actions."""
    one = OrderProblem(StageTimes([[2]], [[3]], [[1]]), [[1]], [1], (0,))
    schedule = gpipe(1, 1)
    improved = improve_windows(one, schedule, Effort(100_000), size=size)
    assert (improved.schedule, improved.makespan, improved.windows, improved.proved, improved.optimal) == (
        schedule,
        6,
        1,
        1,
        True,
    )


@pytest.mark.parametrize("stages", [2, 3])
def test_what_is_shorter_only_without_queues_is_neither_taken_nor_is_anything_proved(stages: int) -> None:
    """One of two equal micro-batches waits for the link, and has its way there and back: no order is shorter."""
    ones, sends = [[1, 1]] * stages, [[20, 20]] * (stages - 1)
    times = StageTimes(ones, ones, ones, None, sends, sends)
    queued = OrderProblem(times, [[1, 1]] * stages, [2] * stages, tuple(range(stages)))
    schedule = one_f_one_b(stages, 2)
    improved = improve_windows(queued, schedule, Effort(1_000_000))
    assert improved.makespan == evaluate(schedule, times).makespan == 20 + 40 * (stages - 1) + 3 * stages
    assert (improved.windows, improved.proved, improved.optimal) == (1, 0, False)
