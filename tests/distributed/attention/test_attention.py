"""Distributed attention equals the attention of one process: output and every gradient, for every degree and grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.kernels.attention.sequence_shard import even_split
from tests.distributed.attention_cases import Case, check
from tests.distributed.harness import run_ranks
from tests.slow import slow

GRIDS = {1: ((1, 1),), 2: ((2, 1), (1, 2)), 3: ((3, 1), (1, 3)), 4: ((4, 1), (2, 2), (1, 4))}
QUICK = ((1, 1), (1, 2), (3, 1), (1, 3), (2, 2))
GRID_IDS = [
    (degree, grid) if grid in QUICK else slow(degree, grid) for degree, grids in GRIDS.items() for grid in grids
]


def case(degree: int, grid: tuple[int, int], total: int = 23, **fields: object) -> Case:
    return Case(tuple(range(degree)), even_split(total, degree), *grid).with_(**fields)


def verify(degree: int, *cases: Case) -> None:
    world = max(2, degree)
    assert sum(run_ranks(world, check, cases)) == sum(len(c.ranks) for c in cases)


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_any_number_of_heads_is_legal_at_any_degree(degree: int, grid: tuple[int, int]) -> None:
    verify(degree, *(case(degree, grid, heads=heads) for heads in (1, 2, 3, 12, 24, 30)))


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_single_precision_holds_to_1e_5(degree: int, grid: tuple[int, int]) -> None:
    masks = ("none", "key", "full")
    verify(degree, *(case(degree, grid, 61, dtype=torch.float32, mask=mask) for mask in masks))


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_bf16_stays_near_exact_arithmetic(degree: int, grid: tuple[int, int]) -> None:
    verify(
        degree, case(degree, grid, 61, dtype=torch.bfloat16), case(degree, grid, 61, dtype=torch.bfloat16, mask="key")
    )


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_causal_attention_follows_the_global_order_of_the_tokens(degree: int, grid: tuple[int, int]) -> None:
    parts = ((None,), (None, 5), (5, None))
    verify(degree, *(case(degree, grid, query_parts=p, key_parts=p, is_causal=True) for p in parts))


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_masks_keep_their_rows_and_columns(degree: int, grid: tuple[int, int]) -> None:
    parts = ((None,), (None, 5), (5, None))
    masks = ("key", "full", "additive", "dead")
    verify(degree, *(case(degree, grid, query_parts=p, key_parts=p, mask=m) for p in parts for m in masks))


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_text_of_any_length_may_stand_before_after_or_apart(degree: int, grid: tuple[int, int]) -> None:
    shard = even_split(23, degree)[0]
    cases = [
        case(degree, grid, query_parts=query, key_parts=key)
        for text in (1, 2, shard, 23)  # fewer than ranks; as long as a shard; as long as the sequence
        for query, key in (
            ((None, text), (None, text)),
            ((text, None), (text, None)),
            ((text,), (None,)),
            ((None,), (text,)),
        )
    ]
    cases.append(case(degree, grid, query_parts=(None,), key_parts=(None, 7), mask="key"))
    cases.append(case(degree, grid, query_parts=(3, None, 4), key_parts=(3, None, 4), mask="full"))
    verify(degree, *cases)


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_query_heads_may_share_key_heads(degree: int, grid: tuple[int, int]) -> None:
    pairs = ((6, 2), (6, 3), (5, 1), (12, 4))
    verify(degree, *(case(degree, grid, heads=q, key_heads=k, mask=m) for q, k in pairs for m in ("none", "full")))


@pytest.mark.parametrize(("degree", "grid"), GRID_IDS)
def test_a_head_of_values_may_have_another_size_and_the_scale_may_be_given(degree: int, grid: tuple[int, int]) -> None:
    verify(degree, case(degree, grid, value_size=5, scale=0.3), case(degree, grid, value_size=5, is_causal=True))


@pytest.mark.parametrize(
    ("tokens", "grid"),
    [
        ((0, 7), (2, 1)),
        ((7, 0), (1, 2)),
        ((5, 0, 0), (1, 3)),
        ((0, 0, 5), (3, 1)),
        ((1, 9, 2, 0), (2, 2)),
        ((0, 0, 3, 8), (2, 2)),
        ((6, 0, 1, 5), (1, 4)),
        ((6, 0, 1, 5), (4, 1)),
        ((0, 0, 0, 1), (1, 4)),
    ],
)
def test_shards_may_be_uneven_and_empty(tokens: tuple[int, ...], grid: tuple[int, int]) -> None:
    degree = len(tokens)
    base = Case(tuple(range(degree)), tokens, *grid)
    joint = base.with_(query_parts=(None, 3), key_parts=(None, 3))
    verify(degree, base, base.with_(is_causal=True), base.with_(mask="full"), joint, joint.with_(mask="dead"))


def test_two_groups_work_beside_each_other_and_then_all_ranks_together() -> None:
    cases = (
        Case((0, 1, 2), (4, 3, 3), 1, 3),
        Case((3,), (9,), 1, 1),
        Case((0, 1, 2, 3), (3, 3, 2, 2), 2, 2),
        Case((0, 1), (3, 3), 2, 1),
        Case((2, 3), (5, 4), 1, 2),
        Case((0, 1, 2, 3), (3, 3, 2, 2), 4, 1),
    )
    assert run_ranks(4, check, cases) == [4, 4, 4, 4]


def test_ranks_may_stand_in_any_order() -> None:
    verify(4, Case((2, 0, 3, 1), (4, 3, 2, 1), 2, 2), Case((3, 1), (4, 3), 1, 2), Case((3, 1), (4, 3), 2, 1))


PARTS = st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=3).filter(
    lambda parts: parts.count(None) <= 1
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    degree = draw(st.integers(1, 4))
    order = draw(st.permutations(range(4)))
    ulysses, ring = draw(st.sampled_from(GRIDS[degree]))
    key_heads = draw(st.integers(1, 5))
    sharing = draw(st.sampled_from((1, 1, 2, 3)))
    query_parts = tuple(draw(PARTS))
    is_causal = draw(st.booleans())
    return Case(
        ranks=tuple(order[:degree]),
        tokens=tuple(draw(st.lists(st.integers(0, 9), min_size=degree, max_size=degree))),
        ulysses=ulysses,
        ring=ring,
        heads=key_heads * sharing,
        key_heads=key_heads if sharing > 1 else None,
        query_parts=query_parts,
        key_parts=draw(st.sampled_from((query_parts, (None,), (2, None)))),
        mask="none" if is_causal else draw(st.sampled_from(("none", "key", "full", "additive", "dead"))),
        is_causal=is_causal,
        head_size=draw(st.sampled_from((1, 4, 8))),
        batch=draw(st.integers(1, 2)),
    )


@settings(max_examples=2 * settings.default.max_examples)
@given(cases())
def test_any_case_that_can_be_drawn_agrees(drawn: Case) -> None:
    run_ranks(4, check, (drawn,))
