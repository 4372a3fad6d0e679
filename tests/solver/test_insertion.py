"""Insertion: every step once and in order, a chain gives way to those before it, and the search is never worse."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.budget import Clock
from arachnec.solver.insertion import Grid, Taken, inserted
from arachnec.solver.insertion_search import improved, inserted_all
from arachnec.solver.malleable import Chain, Piece, Rate, Run
from tests.solver.test_malleable import chains, demand_schedule


@st.composite
def arriving(draw: st.DrawFn) -> list[Chain]:
    return [Chain(chain.runs, draw(st.integers(0, 100))) for chain in draw(chains)]


def ends_of(of: list[Chain], pieces: list[Piece]) -> list[int]:
    return [max(piece.end for piece in pieces if piece.chain == number) for number in range(len(of))]


@given(arriving(), st.sampled_from([(4, (1, 2, 4)), (6, (1, 3, 6)), (7, (1, 2, 4))]), st.data())
@settings(max_examples=40, deadline=None)
def test_insertion_and_its_search_give_schedules_and_the_search_is_no_worse(
    of: list[Chain], cluster: tuple[int, tuple[int, ...]], data: st.DataObject
) -> None:
    of = [chain for chain in of if chain.narrowest <= cluster[1][-1]]
    grid = Grid(*cluster)
    prices = [data.draw(st.sampled_from([0.0, 1.0, 5.0])) for _ in of]
    pieces = inserted_all(of, grid, data.draw(st.permutations(range(len(of)))), prices, Clock(0.0, 0.0))
    demand_schedule(of, pieces, grid.gpus)
    better = [improved(of, grid, pieces, mean_end, Clock(0.0, 0.0, 3.0), seed=1) for _ in range(2)]
    demand_schedule(of, better[0], grid.gpus)
    assert better[0] == better[1]
    assert not of or mean_end(ends_of(of, better[0])) <= mean_end(ends_of(of, pieces))


def mean_end(ends: list[int] | tuple[int, ...]) -> tuple[float, float]:
    return sum(ends) / max(1, len(ends)), 0.0


def test_a_chain_gives_way_at_a_step_and_goes_on_behind() -> None:
    """The short one has 25 to 35: the long one takes two steps before it and eight behind."""
    of = [Chain((Run(10, (Rate(1, 10),)),)), Chain((Run(1, (Rate(1, 10),)),), 25)]
    pieces = inserted_all(of, Grid(1, (1,)), [1, 0], [0.0, 0.0], Clock(0.0, 0.0))
    assert [(p.steps, p.start, p.end) for p in pieces if p.chain == 0] == [(2, 0, 20), (8, 35, 115)]


def test_a_high_price_makes_a_chain_narrow() -> None:
    chain = Chain((Run(2, (Rate(1, 10), Rate(2, 6), Rate(4, 5))),))
    degrees = [
        inserted(0, chain, Grid(4, (1, 2, 4)), Taken(Grid(4, (1, 2, 4))), price)[0].degree for price in (0, 1, 10)
    ]
    assert degrees == [4, 2, 1]


def test_while_a_wide_block_is_taken_a_chain_goes_on_in_a_part_of_it() -> None:
    """One of two GPUs is taken up to 20: two steps on the other, then both for the last two."""
    taken = Taken(Grid(2, (1, 2)), [Piece(1, 0, 0, 1, 1, 1, 0, 20)])
    pieces = inserted(0, Chain((Run(4, (Rate(1, 10), Rate(2, 5))),)), Grid(2, (1, 2)), taken, 0.0)
    assert [(p.steps, p.degree, p.start, p.end) for p in pieces] == [(2, 1, 0, 20), (2, 2, 20, 30)]


def test_a_run_that_needs_fewer_gpus_leaves_the_others_free() -> None:
    """Encoding takes one of two GPUs, and another chain the other meanwhile."""
    of = [Chain((Run(1, (Rate(1, 10),)), Run(1, (Rate(2, 10),)))), Chain((Run(1, (Rate(1, 10),)),))]
    pieces = inserted_all(of, Grid(2, (1, 2)), [0, 1], [0.0, 0.0], Clock(0.0, 0.0))
    demand_schedule(of, pieces, 2)
    assert ends_of(of, pieces) == [20, 10]
