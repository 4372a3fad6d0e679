"""Bounds of latency: on small instances below every schedule of whole runs, and met where they can be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.budget import Clock
from arachnec.solver.insertion import Grid
from arachnec.solver.insertion_search import inserted_all
from arachnec.solver.latency_bound import Demand, least_mean_latency, least_percentile, on_time
from arachnec.solver.malleable import Chain, Rate, Run
from tests.solver.test_malleable import runs

EQUAL = 1 + 1e-9


def schedules(of: list[Chain], gpus: int) -> Iterator[list[int]]:
    """Latencies of the chains under every order of their runs and every degree of each, as early as may be."""
    turns = [number for number, chain in enumerate(of) for _ in chain.runs]
    for order in sorted(set(permutations(turns))):
        seen, listed = [0] * len(of), []
        for number in order:
            listed.append(of[number].runs[seen[number]])
            seen[number] += 1
        for rates in product(*([rate for rate in run.rates if rate.degree <= gpus] for run in listed)):
            free, ready = [0] * gpus, [chain.release for chain in of]
            for number, run, rate in zip(order, listed, rates, strict=True):
                free.sort()
                end = max(ready[number], free[rate.degree - 1]) + run.steps * rate.ticks
                ready[number] = end
                free[: rate.degree] = [end] * rate.degree
            yield [end - chain.release for end, chain in zip(ready, of, strict=True)]


@st.composite
def arriving(draw: st.DrawFn) -> list[Chain]:
    """One to three chains, of two runs or one."""
    count = draw(st.integers(1, 3))
    lengths = {1: 3, 2: 2, 3: 1}
    return [
        Chain(tuple(draw(st.lists(runs(), min_size=1, max_size=lengths[count]))), draw(st.integers(0, 150)))
        for _ in range(count)
    ]


@given(arriving(), st.sampled_from([2, 3, 4]))
@settings(max_examples=60, deadline=None)
def test_no_schedule_of_a_small_instance_is_below_the_bounds(of: list[Chain], gpus: int) -> None:
    of = [chain for chain in of if chain.narrowest <= gpus]
    narrow = [
        Chain(tuple(Run(r.steps, tuple(x for x in r.rates if x.degree <= gpus)) for r in c.runs), c.release) for c in of
    ]
    demands = [Demand(chain.release, ((1, chain),)) for chain in narrow]
    mean = least_mean_latency(demands, gpus)
    ranked = [least_percentile(demands, gpus, late) for late in range(len(of))]
    for latencies in schedules(narrow, gpus) if of else ():
        assert mean * len(of) <= sum(latencies) * EQUAL
        for late, latency in enumerate(sorted(latencies, reverse=True)):
            assert ranked[late] <= latency * EQUAL


@given(st.lists(runs(), min_size=4, max_size=40), st.sampled_from([2, 4, 8]), st.data())
@settings(max_examples=40, deadline=None)
def test_no_schedule_by_insertion_is_below_the_bounds(drawn: list[Run], gpus: int, data: st.DataObject) -> None:
    of = [Chain((run,), data.draw(st.integers(0, 40)) * number) for number, run in enumerate(drawn)]
    of = [chain for chain in of if max(rate.degree for run in chain.runs for rate in run.rates) <= gpus]
    grid = Grid(gpus, tuple(width for width in (1, 2, 4, 8) if width <= gpus))
    demands = [Demand(chain.release, ((1, chain),)) for chain in of]
    price, order = data.draw(st.sampled_from([0.0, 1.0, 9.0])), data.draw(st.permutations(range(len(of))))
    pieces = inserted_all(of, grid, order, [price] * len(of), Clock(0.0, 0.0))
    ends = {piece.chain: piece.end for piece in sorted(pieces, key=lambda piece: piece.end)}
    latencies = sorted(ends[number] - chain.release for number, chain in enumerate(of))
    assert least_mean_latency(demands, gpus) * len(of) <= sum(latencies) * EQUAL
    for late in (0, 1, len(of) // 2):
        if late < len(of):
            assert least_percentile(demands, gpus, late) <= latencies[len(of) - 1 - late] * EQUAL


def request(release: int, area: int, *degrees: int, steps: int = 1) -> Demand:
    """That is as fast as its degree, up to the last of them."""
    return Demand(release, ((1, Chain((Run(steps, tuple(Rate(d, area // d) for d in degrees)),), release)),))


def test_on_one_gpu_the_bound_of_the_mean_is_what_shortest_remaining_first_comes_to() -> None:
    """A short request interrupts a long one: latencies 2 and 12."""
    assert least_mean_latency([request(0, 10, 1), request(4, 2, 1)], 1) == pytest.approx(7.0)


def test_a_request_ends_no_sooner_than_at_its_fastest_rate() -> None:
    """Two requests of one GPU each on four of them: both take 10; one fast machine takes 2.5 and 5."""
    assert least_mean_latency([request(0, 10, 1)] * 2, 4) == pytest.approx(10.0)


def test_many_requests_side_by_side_wait_for_whole_ones() -> None:
    """Forty equal ones on four GPUs end in rounds of 10: 55 in the mean. One fast machine would end them at 51 1/4."""
    assert least_mean_latency([request(0, 10, 1)] * 40, 4) == pytest.approx(55.0)


def test_those_that_hinder_most_may_be_late() -> None:
    """Of five requests one may be late: without the long one no other waits."""
    demands = [request(0, 100, 1), *(request(10 * n, 9, 1) for n in range(4))]
    assert least_percentile(demands, 1, 1) == pytest.approx(9.0, abs=0.6)
    assert on_time(demands, 1, 9.0, 1) == [1, 2, 3, 4]
    assert least_percentile(demands, 1, 0) == pytest.approx(109.0, abs=0.6)


def test_a_batch_that_needs_less_work_a_request_lowers_the_bound() -> None:
    alone, pair = (Chain((Run(1, (Rate(1, ticks),)),)) for ticks in (10, 12))
    single, both = Demand(0, ((1, alone),)), Demand(0, ((1, alone), (2, pair)))
    assert least_mean_latency([single] * 2, 1) == pytest.approx(15.0)
    assert least_mean_latency([both] * 2, 1) <= 12.0
    assert both.work == 6.0 and both.work_within(11) == 10.0 and math.isinf(both.work_within(9))


def test_requests_that_take_no_time_do_not_hinder_and_none_has_no_bound() -> None:
    nothing = request(5, 0, 1)
    assert least_mean_latency([], 2) == least_mean_latency([nothing] * 2, 2) == 0.0
    assert least_mean_latency([request(0, 10, 1), nothing], 1) == pytest.approx(5.0)
    assert least_percentile([nothing], 2, 0) == least_percentile([], 2, 0) == 0.0
