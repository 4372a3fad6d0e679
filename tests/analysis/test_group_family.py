"""The family of aligned groups: what is in it, and that no rank needs more of them than there may be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.communicators import (
    ALWAYS,
    MOST_COMMUNICATORS,
    aligned,
    family,
    family_grids,
    heads_of,
    in_family,
)
from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Cascade, Phase, Stage
from arachnec.ir.values import Attributes
from arachnec.kernels.attention.subgroups import subgroups


@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from([(), (12,), (24,), (30,), (40,), (48,), (12, 40)]))
def test_no_rank_is_in_more_groups_than_there_may_be(nodes: int, gpus: int, heads: tuple[int, ...]) -> None:
    cluster = parse_cluster(f"{nodes}x{gpus}:h100-80g")
    members = Counter(rank for group in family(cluster, heads) for rank in group)
    assert max(members.values(), default=0) <= MOST_COMMUNICATORS - ALWAYS
    assert all(group[0] >= 0 and group[-1] < cluster.world for group in family(cluster, heads))
    for ulysses, ring in family_grids(cluster, heads):
        for ranks in aligned(cluster, ulysses * ring):
            assert set(subgroups(ranks, ulysses, ring)) <= set(family(cluster, heads))


@pytest.mark.parametrize("heads", [12, 24, 40])
def test_parts_of_a_node_and_doubled_nodes_are_in_it(heads: int) -> None:
    sizes = {ulysses * ring for ulysses, ring in family_grids(parse_cluster("8x8:h100-80g"), (heads,))}
    assert {2, 4, 8, 16, 32} <= sizes
    if heads != 40:
        assert 24 in sizes


def test_groups_of_less_than_a_node_lie_in_one() -> None:
    cluster = parse_cluster("2x8:h100-80g")
    assert aligned(cluster, 3) == ((0, 1, 2), (3, 4, 5), (9, 10, 11), (12, 13, 14))
    assert aligned(cluster, 16) == (tuple(range(16)),)


def test_a_cascade_is_in_the_family_by_its_ranks_and_its_grid() -> None:
    cluster = parse_cluster("2x8:h100-80g")
    twelve, none = family_grids(cluster, (12,)), family_grids(cluster)

    def cascade(ranks: range | tuple[int, ...], **grid: int) -> Cascade:
        attrs = Attributes.of(degree=len(ranks), ranks=tuple(ranks), **grid)
        return Cascade("t", Phase.TRAIN, "dit", (0,), 1, 1000, 0, (), attrs)

    assert in_family(cascade(range(4, 8), ulysses=4, ring=1), twelve)
    assert not in_family(cascade(range(2, 6), ulysses=4, ring=1), twelve)
    assert not in_family(cascade((4, 5, 6, 8), ulysses=4, ring=1), twelve)
    assert not in_family(cascade(range(4, 8), ulysses=1, ring=4), twelve)
    assert in_family(cascade((3,), ulysses=1, ring=1), twelve)
    assert in_family(cascade(range(8)), none)


def test_heads_are_those_of_trained_stages() -> None:
    stages = (
        Stage("dit", True, Attributes.of(heads=40)),
        Stage("text", False, Attributes.of(heads=64)),
        Stage("unet", True, Attributes.of()),
    )
    assert heads_of(stages) == (40,)
