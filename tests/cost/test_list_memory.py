"""Memory of lists: no run of the plan holds more, whatever it measures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.sparse_attention import lists_gib
from arachnec.ir.head_density import HeadPart, parts_by_layer
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase
from arachnec.ir.values import Value
from arachnec.kernels.sparse.predictor import kept_blocks
from arachnec.kernels.sparse.token_cubes import token_cubes
from arachnec.lowering.head_division import with_heads
from arachnec.sparsity.head_shares import Share, by_number, lists_fit
from tests.cost.test_sparse_attention import clip, model, stage

GPU: dict[str, Value] = {"sparse_speed": (0.4, 0.4, 1.0), "key_block": 64, "query_group": 64}
GRID, PIXELS = (5, 15, 26), Clip(0, 17, 240, 416, 77, math.prod((5, 15, 26)))


def cascade_of(**attrs: Value) -> Cascade:
    return replace(clip(PIXELS.tokens, sparse=(0, 1), **attrs), text=PIXELS.text)


def test_lists_are_held_until_the_backward_and_divided_by_the_ranks() -> None:
    """All blocks in every list. Of four heads each of two ranks has two, and of three ranks one has."""
    of = stage()
    groups, blocks = 157, 625
    one, two, three = (lists_gib(of, clip(sparse=(0, 1)), ranks) * 2**30 / 4 for ranks in (1, 2, 3))
    assert one == pytest.approx(2 * groups * 4 * (blocks + 1))
    assert two == three == pytest.approx(2 * groups * 2 * (blocks + 1))
    cost = model(of)
    assert cost.memory(clip(sparse=(0, 1)), 2) - cost.memory(clip(), 2) == pytest.approx(two * 4 / 2**30)


@pytest.mark.parametrize("size", ["query_group", "key_block"])
def test_a_stage_that_says_no_size_of_groups_or_of_blocks_has_no_lists(size: str) -> None:
    """Nor has a cascade of which no layer is sparse."""
    of = stage()
    assert lists_gib(of, clip(sparse=(0, 1)), 1) > 0 == lists_gib(of, clip(), 1)
    assert lists_gib(replace(of, attrs=of.attrs.updated(**{size: None})), clip(sparse=(0, 1)), 1) == 0
    assert lists_gib(replace(of, attrs=of.attrs.updated(**{size: 0})), clip(sparse=(0, 1)), 1) == 0


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.TRAIN, Phase.DENOISE])
def test_of_clips_side_by_side_a_rank_holds_the_lists_of_its_own_on_their_ranks(phase: Phase) -> None:
    """Two on two ranks each: of four heads a rank has two."""
    groups, blocks = 157, 625
    more: dict[str, Value] = {"branches": 2, "steps": (0, 3)} if phase is Phase.DENOISE else {}
    batch = 1 if phase is Phase.DENOISE else 2
    plain, listed = clip(**more), clip(**more, sparse=(0, 1))
    dense, sparse = (replace(cascade, phase=phase, batch=batch) for cascade in (plain, listed))
    cost = model(stage())
    lists = 2 * groups * 2 * (blocks + 1) * 4 / 2**30
    assert cost.memory(sparse, 4, side=2) - cost.memory(dense, 4, side=2) == pytest.approx(lists)
    assert cost.memory(sparse, 4) - cost.memory(dense, 4) == pytest.approx(2 * lists / 2), "both, on four ranks"


def test_captions_are_in_every_list_and_groups_and_blocks_are_cubes_of_the_grid() -> None:
    of = stage(**GPU, caption_tokens=(1, 10))
    cubes = token_cubes(GRID, captions=87, queries=64, keys=64)
    groups, blocks = len(cubes.groups) - 1, len(cubes.blocks) - 1 - cubes.captions
    assert groups > math.ceil(PIXELS.tokens / 64) and cubes.captions == 2
    expected = 2 * groups * 4 * (blocks + cubes.captions + 1)
    assert lists_gib(of, cascade_of(), 1, PIXELS) * 2**30 / 4 == pytest.approx(expected)


def test_of_a_model_that_samples_densities_stay_as_they_are() -> None:
    of = replace(stage(((0.5, 0.1, 0.1, 0.3),) * 2), trained=False)
    one, two = (lists_gib(of, clip(sparse=(0, 1)), ranks) * 2**30 for ranks in (1, 2))
    assert one == pytest.approx(2 * 4 * 157 * (sum(kept_blocks((0.5, 0.1, 0.1, 0.3), 625)) + 4))
    assert two == one / 2
    rows = ((0, 1), 0.5, (0.5, 0.1, 0.1, 0.3)), ((0, 1), 0.5, (0.9, 0.2, 0.2, 0.4), 32768)
    by_class = replace(of, attrs=of.attrs.updated(density=rows))
    assert lists_gib(by_class, clip(20_000, sparse=(0, 1)), 1) == lists_gib(of, clip(20_000, sparse=(0, 1)), 1)
    longer = lists_gib(by_class, clip(sparse=(0, 1)), 1) * 2**30
    assert longer == pytest.approx(2 * 4 * 157 * (sum(kept_blocks((0.9, 0.2, 0.2, 0.4), 625)) + 4))


@given(
    assumed=st.lists(st.floats(0.01, 0.39), min_size=4, max_size=4).map(tuple),
    drawn=st.lists(st.floats(0.001, 1.0), min_size=4, max_size=4),
    degree=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_whatever_densities_a_run_measures_no_rank_s_lists_are_larger(
    assumed: tuple[float, ...], drawn: list[float], degree: int
) -> None:
    """Heads are divided by other densities than those that are measured."""
    of = stage((assumed,) * 2, **GPU, caption_tokens=(1, 0))
    planned = cascade_of(degree=degree)
    module = Module(
        "m", Level.PLACED, parse_cluster("1x8:h100-80g"), clips=(PIXELS,), stages=(of,), cascades=(planned,)
    )
    (planned,) = with_heads(module)
    cubes = token_cubes(GRID, captions=PIXELS.text, queries=64, keys=64)
    groups, blocks = len(cubes.groups) - 1, len(cubes.blocks) - 1 - cubes.captions
    kept, parts = kept_blocks(drawn, blocks), parts_by_layer(planned).get(0, ())
    if degree == 1 or not lists_fit(parts, kept, degree, groups, blocks, cubes.captions):
        shares = by_number(4, groups, degree)
    else:
        of_rank = [[part for part in parts if part.place == place] for place in range(degree)]
        shares = tuple(tuple(Share(p.head, p.start, p.stop) for p in own) for own in of_rank)
    held = [sum(s.groups * (kept[s.head] + cubes.captions) + groups for s in own) for own in shares]
    assert lists_gib(of, planned, degree, PIXELS) * 2**30 >= 2 * 4 * max(held) * (1 - 1e-9)


def test_a_division_whose_lists_have_no_room_is_told() -> None:
    """Three heads that were assumed light are on one of two ranks."""
    parts = [HeadPart(0, 0, 0, 10), *(HeadPart(head, 1, 0, 10) for head in (1, 2, 3))]
    assert lists_fit(parts, (100, 10, 10, 10), 2, 10, 100, 2)
    assert not lists_fit(parts, (10, 100, 100, 10), 2, 10, 100, 2)
