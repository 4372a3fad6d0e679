"""k follows the transfer times under the memory limit."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.evaluate import StageTimes, evaluate, held, uniform_times
from arachnec.pipelining.order_search import choose_k, groupings, require_held
from arachnec.pipelining.schedules import kfkb
from arachnec.planning.pipeline_orders import Replica, group_size

ONES = [[1] * 16] * 4
HALF = Fraction(1, 2)


def link(c: float) -> StageTimes:
    return uniform_times(4, 16, 1, HALF, HALF, Fraction(c))


@pytest.mark.parametrize(("c", "k"), [(0, 1), (0.5, 2), (1, 2), (1.5, 4), (2, 4), (3, 2)])
def test_k_is_the_best_that_was_measured(c: float, k: int) -> None:
    assert choose_k(link(c), ONES, [64] * 4).k == k


def test_the_memory_limits_k() -> None:
    assert choose_k(link(2), ONES, [8] * 4).k == 2
    assert choose_k(link(2), ONES, [7] * 4).k == 1
    with pytest.raises(UserError, match="groups of 1 micro-batches save 2 bytes on rank 2, which may hold 1"):
        choose_k(link(2), ONES, [4, 4, 1, 4])
    require_held(2, ONES, [8] * 4)
    with pytest.raises(UserError):
        require_held(4, ONES, [8] * 4)


def test_k_changes_with_a_link_that_drops_to_a_tenth_and_recovers_and_not_for_nothing() -> None:
    k = 1
    chosen = []
    for c in (0, 0.15, 1.5, 1.5, 0.15, 0.001, 0):
        k = choose_k(link(c), ONES, [64] * 4, now=k).k
        chosen.append(k)
    assert chosen[2] > 1
    assert chosen[3] == chosen[2]
    assert chosen[-1] == chosen[-2]
    good, bad = (evaluate(kfkb(4, 16, chosen[2]), link(c)).makespan for c in (0, 1.5))
    assert bad <= 0.9 * evaluate(kfkb(4, 16, 1), link(1.5)).makespan
    assert good <= 1.02 * evaluate(kfkb(4, 16, 1), link(0)).makespan


def test_plans_for_links_that_slow_down_and_come_back_take_k_from_1_up_and_back_to_1() -> None:
    """Each plan chooses anew: none knows which k is in use."""
    plans = [Replica(link(c), ONES, [64] * 4, (0, 1, 2, 3)) for c in (0, 0.001, 1.5, 2, 0.001, 0)]
    chosen = [group_size(replica, None) for replica in plans]
    assert chosen[:2] == chosen[4:] == [1, 1]
    assert min(chosen[2:4]) > 1


@given(st.integers(1, 200))
def test_groups_worth_a_look_are_all_divisors_and_powers_of_two_and_no_others(count: int) -> None:
    divisors = {k for k in range(1, count + 1) if any(k * times == count for times in range(1, count + 1))}
    powers = {2**n for n in range(8) if 2**n <= count}
    assert groupings(count) == sorted(divisors | powers)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 9), st.integers(1, 40))
def test_no_k_that_fits_is_shorter(lengths: list[int], c: int, room: int) -> None:
    rows = [lengths] * 3
    times = StageTimes(rows, rows, rows, None, [[c] * len(lengths)] * 2, [[c] * len(lengths)] * 2)
    limits = [room] * 3
    every = range(1, len(lengths) + 1)
    fitting = [k for k in every if max(held(kfkb(3, len(lengths), k), rows)) <= room]
    if not fitting:
        with pytest.raises(UserError):
            choose_k(times, rows, limits, candidates=every)
        return
    chosen = choose_k(times, rows, limits, candidates=every)
    assert chosen.k in fitting
    least = min(evaluate(kfkb(3, len(lengths), k), times).makespan for k in fitting)
    assert chosen.makespans[chosen.k] == least
