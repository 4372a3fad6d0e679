"""Chains of equal steps: what wrap-around and pools give is a schedule, and none is below the bound."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.malleable import Chain, Piece, Rate, Run, least_makespan, length, wrapped
from arachnec.solver.pools import Pool, in_pools, two_pools


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Rates at degrees 1, 2, 4, some of them, each faster than the narrower one and none cheaper by area."""
    alone = draw(st.integers(4, 40))
    most = draw(st.sampled_from([1, 2, 4]))
    rates, ticks = [Rate(1, alone)], alone
    for degree in (2, 4):
        ticks = draw(st.integers(-(-alone // degree), ticks)) if ticks > 1 else ticks
        if degree <= most and ticks < rates[-1].ticks:
            rates.append(Rate(degree, ticks))
    return Run(draw(st.integers(1, 6)), tuple(rates))


chains = st.lists(st.lists(runs(), min_size=1, max_size=3).map(lambda own: Chain(tuple(own))), min_size=1, max_size=7)


def demand_schedule(of: list[Chain], pieces: list[Piece], gpus: int) -> None:
    """No GPU does two things at once, and every chain takes each of its steps once, in order."""
    lanes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for piece in pieces:
        run = of[piece.chain].runs[piece.run]
        ticks = next(rate.ticks for rate in run.rates if rate.degree == piece.degree)
        assert piece.end - piece.start == piece.steps * ticks
        for gpu in range(piece.first, piece.first + piece.degree):
            assert gpu < gpus
            lanes[gpu].append((piece.start, piece.end))
    for lane in lanes.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(lane)))
    for number, chain in enumerate(of):
        own = sorted((p for p in pieces if p.chain == number), key=lambda p: (p.run, p.begin))
        steps = [(p.run, p.begin + step) for p in own for step in range(p.steps)]
        assert steps == [(run, step) for run, one in enumerate(chain.runs) for step in range(one.steps)]
        assert all(before.end <= after.start for before, after in pairwise(own))
        assert own[0].start >= chain.release


@given(chains, st.sampled_from([1, 2, 3, 4, 6, 8]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_wrap_around_is_a_schedule_and_never_below_the_bound(of: list[Chain], gpus: int, wide: bool) -> None:
    if wide and gpus >= 4:  # the first does not fit one GPU's memory
        of = [Chain(tuple(Run(run.steps, run.rates[-1:]) for run in of[0].runs)), *of[1:]]
    bound = least_makespan(of, gpus)
    widths = tuple(width for width in (1, 2, 4) if width <= gpus)
    pieces = wrapped(of, gpus, widths, bound)
    if pieces is not None:
        demand_schedule(of, pieces, gpus)
        assert length(pieces) >= bound


@given(chains, st.integers(2, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_pools_are_a_schedule_and_not_below_their_promise(of: list[Chain], gpus: int, data: st.DataObject) -> None:
    of = [Chain(chain.runs, data.draw(st.integers(0, 50))) for chain in of]
    borders = [data.draw(st.integers(0, len(chain.runs))) for chain in of]
    for least, first, second in two_pools(of, gpus, (1, 2), borders):
        pieces = in_pools(of, [first, second], range(len(of)))
        demand_schedule(of, pieces, gpus)
        assert length(pieces) >= least
    ends = tuple(len(chain.runs) for chain in of)
    whole = in_pools(of, [Pool(0, 1, gpus, (0,) * len(of), ends)], range(len(of)))
    demand_schedule(of, whole, gpus)


def test_one_width_and_more_chains_than_gpus_meet_the_bound() -> None:
    """McNaughton: five equal chains of ten steps on two GPUs end together."""
    of = [Chain((Run(10, (Rate(1, 7),)),))] * 5
    pieces = wrapped(of, 2, (1,), least_makespan(of, 2))
    assert pieces is not None
    assert length(pieces) == least_makespan(of, 2) == 175


def test_the_bound_is_below_every_way_to_take_the_steps_of_a_small_instance() -> None:
    """Two chains of two steps on two GPUs: all degrees of all steps, in all orders."""
    of = [Chain((Run(2, (Rate(1, 10), Rate(2, 6))),)), Chain((Run(2, (Rate(1, 7), Rate(2, 5))),))]
    best = min(
        decoded(of, order, degrees)
        for order in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 0, 1), (1, 0, 1, 0), (1, 1, 0, 0))
        for degrees in product((0, 1), repeat=4)
    )
    assert least_makespan(of, 2) <= best == 20


def decoded(of: list[Chain], order: tuple[int, ...], picks: tuple[int, ...]) -> int:
    """Steps in an order, each as early as its chain and GPUs allow."""
    free, ready = [0, 0], [0] * len(of)
    for chain, pick in zip(order, picks, strict=True):
        rate = of[chain].runs[0].rates[pick]
        free.sort()
        start = max(ready[chain], free[rate.degree - 1])
        ready[chain] = start + rate.ticks
        free[: rate.degree] = [ready[chain]] * rate.degree
    return max(ready)


def test_a_chain_begins_wide_and_goes_on_narrow_beside_another() -> None:
    """Six of ten steps on both GPUs, then four on one, as long as the other chain takes on the other: no gap."""
    of = [Chain((Run(10, (Rate(1, 10), Rate(2, 6))),)), Chain((Run(4, (Rate(1, 10),)),))]
    pieces = wrapped(of, 2, (1, 2), least_makespan(of, 2))
    assert pieces is not None
    demand_schedule(of, pieces, 2)
    assert length(pieces) == least_makespan(of, 2) == 76


def test_where_gaps_are_wide_and_short_chains_are_wider_than_their_least_work_asks() -> None:
    """Four GPUs for 40 ticks, then two short chains on two each; on one each they end at 50."""
    of = [Chain((Run(1, (Rate(4, 40),)),)), *[Chain((Run(1, (Rate(1, 10), Rate(2, 5))),))] * 2]
    pieces = wrapped(of, 4, (1, 2, 4), least_makespan(of, 4))
    assert pieces is not None
    demand_schedule(of, pieces, 4)
    assert length(pieces) == 45
