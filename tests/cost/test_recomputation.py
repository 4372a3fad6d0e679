"""How many blocks run again: as few as fit, memory and time between those of none and of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.compute import share_saved
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.ir.stage_sizes import recompute_value, recomputed_blocks, recomputed_layers
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value

BLOCKS = 10
LAYERS = tuple((f"blocks.{i}", 10**6) for i in range(BLOCKS))
FORWARD = 24_000 * 1e-2


def per_token(value: float, unit: str) -> Formula:
    return Formula((Term(value, (("B", 1), ("S", 1))),), unit)


def model(saved: float = 1e-3, **more: Value) -> CostModel:
    attrs = Attributes.of(
        layers=LAYERS, heads=12, attentions=BLOCKS, state=Quantity(10.0, "GiB"),
        forward=per_token(1e-2, "ms"), backward=per_token(2e-2, "ms"),
        saved=per_token(saved, "GiB"), traffic=per_token(3e-4, "GiB"),
        **{"saved_recompute": per_token(saved / 5, "GiB"), **more},
    )  # fmt: skip
    stages, cascades = (Stage("dit", True, attrs),), (clip(),)
    return CostModel(Module("m", Level.COSTED, parse_cluster("1x8:h100-80g"), stages=stages, cascades=cascades))


def clip(tokens: int = 24_000, **attrs: Value) -> Cascade:
    return Cascade("0", Phase.TRAIN, "dit", (0,), 1, tokens, 100, attrs=Attributes.of(**attrs))


def test_memory_and_time_lie_between_those_of_none_and_of_all() -> None:
    cost = model()
    for blocks in range(BLOCKS + 1):
        assert cost.memory(clip(), 1, blocks) == pytest.approx(24 - (24 - 4.8) * blocks / BLOCKS)
        again = FORWARD * blocks / BLOCKS
        assert cost.time(clip(), 1, recompute=blocks) - cost.time(clip(), 1) == pytest.approx(again)


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.25, 1.0, 3.0])), max_size=4), st.integers(0, 12))
def test_the_first_blocks_save_what_they_save_one_by_one(runs: list[tuple[int, float]], blocks: int) -> None:
    """Where none of them saves anything that is no part of it."""
    spared_by_each = [spared for count, spared in runs for _ in range(count)]
    right = sum(spared_by_each[:blocks]) / sum(spared_by_each) if sum(spared_by_each) else 0.0
    assert share_saved(runs, blocks) == pytest.approx(right)


def test_what_ranks_send_each_other_again_is_that_of_the_recomputed_blocks() -> None:
    none, half, every = (model().volumes(clip(), Attention(4, 1), blocks) for blocks in (0, BLOCKS // 2, BLOCKS))
    assert half.traded == pytest.approx((none.traded + every.traded) / 2)
    assert every.traded == pytest.approx(none.traded * 3 / 2)


@given(st.floats(1e-4, 2e-2), st.sampled_from([1, 2, 3, 8]), st.integers(1, 9), st.floats(0.2, 5))
def test_a_cascade_recomputes_as_few_blocks_as_fit(saved: float, degree: int, first: int, ratio: float) -> None:
    spared = ((first, per_token(ratio, "GiB")), (BLOCKS - first, per_token(1.0, "GiB")))
    for cost in (model(saved), model(saved, spared=spared)):
        room = cost.room_on(None, degree)
        fitting = [n for n in range(BLOCKS + 1) if cost.memory(clip(), degree, n) <= room + 1e-9]
        assert cost.recompute_at(clip(), degree) == min(fitting, default=None)


@given(
    st.lists(st.floats(1e-5, 2e-3), min_size=BLOCKS, max_size=BLOCKS), st.integers(0, BLOCKS), st.floats(0, 1e-2),
    st.floats(0, 1e-2), st.sampled_from([1, 2, 8]),
)  # fmt: skip
def test_a_cascade_holds_what_a_walk_through_forward_and_backward_finds(
    saves: list[float], recomputed: int, head: float, running: float, degree: int
) -> None:
    inputs, work, again = 1e-5, 2e-4, max(saves) + 1e-5
    cost = model(
        sum(saves) + BLOCKS * inputs + head, spared=tuple((1, per_token(saved, "GiB")) for saved in saves),
        saved_recompute=per_token(BLOCKS * inputs + again + head, "GiB"), recomputing=per_token(again, "GiB"),
        shell=per_token(head, "GiB"), head=(per_token(head, "GiB"), per_token(head + running, "GiB")),
        workspace=per_token(work, "GiB"),
    )  # fmt: skip
    kept = [inputs if i < recomputed else inputs + saved for i, saved in enumerate(saves)]
    most = sum(kept) / degree + max(head + running, head + work / degree)
    for i, saved in enumerate(saves):  # the backward has freed the blocks behind
        whole = max(saved + inputs, again) if i < recomputed else kept[i]
        most = max(most, (sum(kept[:i]) + whole + work) / degree)
    counted = cost.memory(clip(), degree, recomputed)
    assert counted >= 24_000 * most - 1e-6
    assert counted <= 24_000 * (most + 2 * again / degree) + 1e-6, "a block's worth above it, where blocks differ"


def test_blocks_that_save_less_count_for_less() -> None:
    cost = model(spared=((5, per_token(1.0, "GiB")), (5, per_token(3.0, "GiB"))))
    assert cost.memory(clip(), 1, 5) == pytest.approx(24 - 19.2 / 4)
    assert cost.memory(clip(), 1, BLOCKS) == pytest.approx(4.8)


def test_a_stage_that_does_not_say_its_layers_recomputes_all_or_nothing() -> None:
    stage = Stage("dit", True, Attributes())
    assert [recomputed_blocks(value, stage) for value in (None, False, 0, True)] == [0, 0, 0, 1]
    assert recompute_value(1, stage) is True
    assert recomputed_layers(True, stage) is True


def test_true_is_all_blocks_and_a_number_the_first_ones() -> None:
    stage = Stage("dit", True, Attributes.of(layers=LAYERS))
    assert [recomputed_blocks(value, stage) for value in (None, True, 3)] == [0, BLOCKS, 3]
    assert [recompute_value(count, stage) for count in (0, 3, BLOCKS)] == [None, 3, True]
    assert recomputed_layers(2, stage) == {"blocks.0", "blocks.1"}
    assert recomputed_layers(BLOCKS, stage) is True
