from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split, offsets
from arachnec.kernels.attention.subgroups import subgroups


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_an_even_split_is_whole_as_even_as_possible_and_larger_first(total: int, parts: int) -> None:
    sizes = even_split(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


def test_offsets_are_where_the_ranges_start() -> None:
    assert offsets((4, 0, 3)) == (0, 4, 4)


def test_a_shard_knows_its_place_in_the_sequence_and_in_the_grid() -> None:
    shard = SequenceShard((4, 5, 6, 7, 12, 13), index=3, tokens=(5, 5, 4, 4, 0, 2), ulysses=2, ring=3)
    assert (shard.degree, shard.total, shard.local, shard.offset) == (6, 20, 4, 14)
    assert shard.ulysses_positions == (2, 3)
    assert shard.ring_positions == (1, 3, 5)


@pytest.mark.parametrize(
    ("ranks", "index", "tokens", "grid", "message"),
    [
        ((0, 1), 0, (3,), (2, 1), "one token count per distinct rank"),
        ((1, 1), 0, (3, 3), (2, 1), "one token count per distinct rank"),
        ((0, 1), 0, (3, 3), (2, 2), "ulysses 2 x ring 2 is not the degree 2"),
        ((0, 1), 2, (3, 3), (2, 1), "position 2 is not one of 2"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(
    ranks: tuple[int, ...], index: int, tokens: tuple[int, ...], grid: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SequenceShard(ranks, index, tokens, *grid)


def test_the_groups_of_a_cascade_are_all_its_ranks_its_rows_and_its_columns() -> None:
    assert subgroups((4, 5, 6, 7), 2, 2) == ((4, 5, 6, 7), (4, 5), (6, 7), (4, 6), (5, 7))
    assert subgroups((0, 1, 2), 3, 1) == ((0, 1, 2),)
    assert subgroups((0, 1, 2), 1, 3) == ((0, 1, 2),)
    assert subgroups((5,), 1, 1) == ()


def test_a_single_rank_needs_no_process_group() -> None:
    assert ProcessGroups().shard((3,), (17,), 1, 1) == SequenceShard((3,), 0, (17,), 1, 1)
