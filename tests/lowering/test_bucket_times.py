"""Buckets of gradients held against trying every split, and the times of a plan against its own cascades."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arachnec.ir.nodes import Cascade, Module, Phase, Stage
from arachnec.ir.stage_sizes import buckets_of
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.lowering.buckets import (
    MOST_BUCKETS,
    NEGLIGIBLE_GAIN,
    best_buckets,
    buckets_of_size,
    finish,
    last_backwards,
)
from arachnec.lowering.order import FORWARD_SHARE, forward_share, global_order, round_bounds
from tests.passes.plans import DIT, cluster, equal_clips, module_of, timed


def stage(counts: list[int], outside: int = 0) -> Stage:
    layers = tuple((f"blocks.{number}", count) for number, count in enumerate(counts))
    return replace(DIT, attrs=DIT.attrs.updated(layers=layers, params=sum(counts) + outside))


def splits(layers: int, buckets: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many layers into runs of at least one, but for the last, which may have none."""
    if buckets == 1:
        yield (layers,)
        return
    for first in range(1, layers + 1):
        for rest in splits(layers - first, buckets - 1):
            yield (first, *rest)


def ends_at(
    counts: list[int],
    outside: int,
    split: tuple[int, ...],
    ends: list[tuple[float, float]],
    took: Callable[[float], float],
) -> float:
    """ms at which the last bucket is summed: each waits for the one before, and for all ranks to have passed it."""
    now, high = 0.0, len(counts)
    for number, run in enumerate(split):
        last, low = number == len(split) - 1, high - run
        size = 4 * (sum(counts[low:high]) + (outside if last else 0))
        passed = max(end - span * (0 if last else low) / len(counts) for end, span in ends)
        now = max(now, passed) + took(size)
        high = low
    return now


ENDS = st.lists(st.tuples(st.floats(0.0, 30.0), st.floats(0.0, 20.0)), min_size=1, max_size=3)
CASES = st.tuples(st.lists(st.integers(100, 9000), min_size=1, max_size=6), st.integers(0, 5000), st.just((0.5, 1e-4)))
FEW = st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any)
FEW_BYTES = st.tuples(FEW, st.integers(0, 3), st.just((0.25, 0.5)))


@given(CASES | FEW_BYTES, ENDS)
@settings(max_examples=100, deadline=None)
def test_buckets_lose_a_hundredth_of_what_any_split_gains_at_most(
    case: tuple[list[int], int, tuple[float, float]], ends: list[tuple[float, float]]
) -> None:
    """Where a byte takes next to nothing, and where each counts."""
    counts, outside, (latency, rate) = case

    def took(size: float) -> float:
        return latency + rate * size

    best = [
        min(ends_at(counts, outside, split, ends, took) for split in splits(len(counts), number))
        for number in range(1, min(MOST_BUCKETS, len(counts) + 1) + 1)
    ]
    of = stage(counts, outside)
    chosen = best_buckets(of, ends, took)
    assert sum(chosen) == len(counts)
    reached = ends_at(counts, outside, chosen, ends, took)
    assert reached <= min(best) + NEGLIGIBLE_GAIN * (best[0] - min(best)) + 1e-9
    assert finish(buckets_of(of, chosen), len(counts), ends, took) == pytest.approx(reached, abs=1e-3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 80))
@example([1, 1], 5)
@example([1, 2], 5)
@settings(max_examples=80, deadline=None)
def test_buckets_of_a_size_are_filled_from_the_last_layer_on(counts: list[int], size: int) -> None:
    buckets, left = buckets_of_size(stage(counts), size), [*counts]
    for run in buckets[:-1]:
        taken = [left.pop() for _ in range(run)]
        assert 4 * sum(taken) >= size > 4 * sum(taken[:-1])
    assert buckets[-1] == len(left)
    assert 4 * sum(left) < size


def two_cascades(*, reads: bool = False) -> Module:
    """Ranks 0 and 1 end with one together, rank 2 with one of its own, rank 3 has nothing."""
    cascades = [
        timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 10.0), (0, 1)),
        timed("b", Phase.TRAIN, 1, 1000, ("a",) if reads else (), (10.0, 40.0), (0, 1)),
        timed("c", Phase.TRAIN, 2, 1000, (), (2.0, 12.0), (2,)),
    ]
    return module_of(cluster(), equal_clips(3), cascades)


def test_a_ranks_last_backward_is_what_its_gradients_wait_for() -> None:
    """A backward is twice its forward here. One that another rank is not last in overlaps nothing."""
    module = two_cascades()
    assert last_backwards(module, DIT, range(4)) == [
        (0.0, 0.0),
        (12.0, pytest.approx(20 / 3)),
        (40.0, pytest.approx(20)),
    ]
    later = timed("d", Phase.TRAIN, 0, 1000, (), (50.0, 56.0), (1,))
    apart = replace(module, cascades=(*module.cascades, later))
    assert last_backwards(apart, DIT, (0, 1)) == [(40.0, 0.0), (56.0, pytest.approx(4.0))]
    other = replace(DIT, name="other")
    assert last_backwards(module, other, (0,)) == [(40.0, 0.0)], "another stage's backward hides none of this"


@pytest.mark.parametrize("scale", [1.0, 1e-9], ids=["long", "short"])
@pytest.mark.parametrize(("blocks", "share"), [(None, 5 / 12), (2, 5 / 14.5), (4, 5 / 17)])
def test_a_forward_takes_its_part_of_a_cascade_and_recomputing_lengthens_the_backward(
    blocks: int | None, share: float, scale: float
) -> None:
    def per_token(ms: float) -> Formula:
        return Formula((Term(ms * scale, (("S", 1),)),), "ms")

    layers = tuple((f"blocks.{number}", 1) for number in range(4))
    attrs = Attributes.of(forward=per_token(5.0), backward=per_token(7.0), layers=layers)
    cascade = Cascade("c", Phase.TRAIN, "dit", (0,), 1, 100, 0, (), Attributes.of(recompute=blocks, degree=1))
    assert forward_share(cascade, Stage("dit", True, attrs)) == pytest.approx(share)
    assert forward_share(cascade, Stage("dit", True, attrs.updated(forward=None))) == FORWARD_SHARE == 1 / 3
    alone = cascade.with_attrs(recompute=None)
    assert forward_share(alone, Stage("dit", True, attrs.updated(backward=None))) == FORWARD_SHARE


def test_rounds_come_one_behind_the_other_whatever_their_times() -> None:
    def at(name: str, round: int, start: float) -> Cascade:
        times = {"start": Quantity(start, "ms"), "end": Quantity(start + 1.0, "ms")}
        return Cascade(name, Phase.TRAIN, "dit", (0,), 1, 9, 0, (), Attributes.of(round=round or None, **times))

    order = global_order((at("late", 1, 0.0), at("first", 0, 5.0), at("last", 2, 1.0), at("second", 0, 6.0)))
    assert [cascade.name for cascade in order] == ["first", "second", "late", "last"]
    assert round_bounds(order) == [(0, 2), (0, 2), (2, 3), (3, 4)]


def test_a_stage_without_parameters_is_one_bucket() -> None:
    assert best_buckets(stage([0, 0, 0], 0), [(20.0, 12.0)], lambda size: size) == (3,)


def test_nothing_of_a_backward_of_its_own_is_a_forward() -> None:
    """It overlaps with all of its time, as does the half of a split one that has the weights' gradients."""
    for phase in (Phase.BACKWARD, Phase.WEIGHT):
        module = replace(two_cascades(), cascades=(timed("b", phase, 0, 1000, (), (10.0, 40.0), (0,)),))
        assert last_backwards(module, DIT, (0,)) == [(40.0, 30.0)]
    module = replace(two_cascades(), cascades=(timed("b", Phase.FORWARD, 0, 1000, (), (10.0, 40.0), (0,)),))
    assert last_backwards(module, DIT, (0,)) == [(40.0, 0.0)]
