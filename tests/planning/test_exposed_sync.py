"""When a placed plan's gradients are all-reduced: never later than any buckets make it; what plans are chosen by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Module, Phase
from arachnec.ir.stage_sizes import buckets_of, gradient_bytes
from arachnec.lowering.buckets import finish
from arachnec.passes.bucket import Bucket
from arachnec.planning.placed_objective import ExposedSync, StageSync, sync_of, through
from tests.passes.plans import DIT, bucket_sizes, cluster, module_of, timed

LAYERS = tuple((f"blocks.{i}", 2_000_000_000) for i in range(8))
STAGE = replace(DIT, attrs=DIT.attrs.updated(layers=LAYERS, params=18_000_000_000))
RATE, LATENCY = 1e-6, 3.0  # ms for a byte, ms


def with_layers(module: Module) -> Module:
    return replace(module, stages=tuple(STAGE if stage.name == "dit" else stage for stage in module.stages))


RANK = st.tuples(st.floats(1, 1000), st.floats(0, 1)).map(lambda pair: (pair[0], pair[0] * pair[1]))
ENDS = st.lists(RANK, min_size=1, max_size=5)  # of the last backward, and how long it takes


def sums_with(latency: float) -> StageSync:
    layer = gradient_bytes(STAGE) / 9  # the ninth part lies in no layer
    return StageSync(STAGE, latency, tuple(RATE * layer * (9 - passed) for passed in range(len(LAYERS))))


@given(ENDS, bucket_sizes(len(LAYERS)))
def test_no_buckets_are_through_earlier(ends: list[tuple[float, float]], buckets: tuple[int, ...]) -> None:
    real = finish(buckets_of(STAGE, buckets), len(LAYERS), ends, lambda size: LATENCY + RATE * size)
    assert through(sums_with(LATENCY), ends) <= real * (1 + 1e-9)


@given(ENDS)
def test_a_bucket_for_every_layer_is_through_then_where_messages_cost_nothing(ends: list[tuple[float, float]]) -> None:
    real = finish(buckets_of(STAGE, (1,) * len(LAYERS)), len(LAYERS), ends, lambda size: RATE * size)
    assert through(sums_with(0.0), ends) == pytest.approx(real)


def test_what_is_left_behind_is_all_but_the_layers_that_are_through() -> None:
    cost = CostModel(with_layers(one_step([(100.0,), (100.0,)])))
    ranks = (0, 1)
    whole = cost.reduce_time(STAGE, ranks)
    sync = sync_of(STAGE, ranks, cost)
    assert sync.latency + sync.behind[0] == pytest.approx(whole)
    assert sync.behind[0] - sync.behind[1] == pytest.approx(sync.behind[0] / 9)
    assert sync.latency + sync.behind[-1] == pytest.approx(
        cost.reduce_time(STAGE, ranks, gradient_bytes(STAGE) * 2 / 9)
    )


def one_step(durations: list[tuple[float, ...]]) -> Module:
    """Every rank's cascades, one after another."""
    cascades: list[Cascade] = []
    for rank, own in enumerate(durations):
        now = 0.0
        for length in own:
            number = len(cascades)
            cascades.append(timed(f"t{number}", Phase.TRAIN, number, 1000, (), (now, now + length), (rank,)))
            now += length
    clips = [Clip(number, 17, 480, 832, 0, 1000) for number in range(len(cascades))]
    return with_layers(module_of(cluster(gpus=len(durations)), clips, cascades))


def test_of_two_plans_as_long_the_one_that_ends_with_long_backwards_is_through_first() -> None:
    long, short = one_step([(100.0,), (100.0,)]), one_step([(100.0,), (25.0, 25.0, 25.0, 25.0)])
    ends = [ExposedSync(plan, CostModel(plan)).of(plan.cascades) for plan in (long, short)]
    assert 100.0 < ends[0] < ends[1]
    synchronised = [max(_through(plan)) for plan in (long, short)]
    assert synchronised[0] < synchronised[1]


def test_a_plan_may_be_reversed_in_time_and_counts_as_the_better_of_both() -> None:
    plans = [one_step([own, own]) for own in ((80.0, 20.0), (20.0, 80.0))]
    first, second = (ExposedSync(plan, CostModel(plan)).of(plan.cascades) for plan in plans)
    assert first == pytest.approx(second)


def test_where_nothing_is_all_reduced_it_is_the_makespan() -> None:
    alone, unnamed = one_step([(40.0, 60.0)]), module_of(*_unnamed())
    several = with_layers(one_step([(100.0,), (70.0,)]))
    nothing = tuple(replace(stage, attrs=stage.attrs.updated(params=0)) for stage in several.stages)
    for plan in (alone, unnamed, replace(several, stages=nothing)):
        assert ExposedSync(plan, CostModel(plan)).of(plan.cascades) == max(cascade.end for cascade in plan.cascades)


def _unnamed() -> tuple[object, ...]:
    plan = one_step([(100.0,), (70.0,)])
    return plan.cluster, list(plan.clips), list(plan.cascades)


def _through(plan: Module) -> list[float]:
    """When the all-reduces of the plan's own buckets are through."""
    from arachnec.lowering.programs import lower
    from arachnec.views.timeline import planned

    return [planned(lower(Bucket(reverse=False).run(plan))).end]
