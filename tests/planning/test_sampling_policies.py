"""What others do and what the search begins with: schedules on ranks, each of every step once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.planning.sampling.policies import (
    coding_apart,
    in_order_of_length,
    one_degree,
    replica,
    side_by_side,
    wrap_arounds,
)
from arachnec.solver.malleable import Chain, Piece, Rate, Run, least_makespan, length
from tests.solver.test_malleable import chains, demand_schedule


@given(chains, st.sampled_from([(4, 2), (4, 4), (6, 3), (8, 4)]))
@settings(max_examples=60, deadline=None)
def test_every_policy_gives_a_schedule_and_none_is_below_the_bound(of: list[Chain], cluster: tuple[int, int]) -> None:
    gpus, node = cluster
    bound = least_makespan(of, gpus)
    parallel = side_by_side(of, gpus, node, bound)
    ways = [*wrap_arounds(of, gpus, node, bound), *in_order_of_length(of, gpus, node)]
    for pieces in (*ways, parallel, replica(of, gpus), one_degree(of, gpus)):
        if pieces is not None:
            demand_schedule(of, pieces, gpus)
            assert length(pieces) >= bound


@pytest.mark.parametrize("works", [(30, 10), (10, 10, 10, 10)])
def test_few_requests_share_the_ranks_by_their_work(works: tuple[int, ...]) -> None:
    of = [Chain((Run(4, tuple(Rate(d, 60 * work // d) for d in range(1, 9))),)) for work in works]
    pieces = side_by_side(of, 8, 8, least_makespan(of, 8))
    assert pieces is not None
    assert length(pieces) <= 1.01 * least_makespan(of, 8)


@given(chains, st.integers(1, 2), st.lists(st.integers(1, 40), min_size=2, max_size=2), st.integers(0, 50))
@settings(max_examples=30, deadline=None)
def test_encoders_and_decoders_apart_leave_the_other_ranks_to_the_models(
    of: list[Chain], share: int, ticks: list[int], gap: int
) -> None:
    """Every run once and in order, coding on ranks of its own, the last latents decoded while models go on, and nothing
    before its request arrives."""
    first, last = (Run(1, (Rate(1, tick),)) for tick in ticks)
    models = [chain for chain in of if all(run.rates[0].degree == 1 for run in chain.runs)]
    coded = [Chain((first, *chain.runs, last), gap * n) for n, chain in enumerate(models)]
    parts = [(1, 1 + len(chain.runs)) for chain in models]
    bound = least_makespan(coded, 4 + share)

    def in_turn(models: Sequence[Chain], left: int) -> Iterator[list[Piece]]:
        assert [chain.release for chain in models] == [chain.release for chain in coded]
        yield replica(models, left) or []

    for pieces in coding_apart(coded, 4 + share, 4, bound, parts, share, in_turn) if coded else ():
        demand_schedule(coded, pieces, 4 + share)
        for piece in pieces:
            assert piece.start >= coded[piece.chain].release
            coding = not parts[piece.chain][0] <= piece.run < parts[piece.chain][1]
            assert (piece.first >= 4) == coding
