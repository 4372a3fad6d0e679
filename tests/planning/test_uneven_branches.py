"""Branches of a step on ranks of unequal number: the slower branch counts, and a plan takes it where ranks differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention, Strategy
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Quantity
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.cascade_ranks import with_ranks
from arachnec.planning.sampling.requests import SwitchForecast, sampling_module
from tests.planning.test_sampling_plan import SHAPES, TEXT, request, tokens


def traced(slowed: tuple[tuple[int, float], ...], count: int = 1, memory: int = 80) -> Module:
    """Guided requests on three ranks, some of them slow."""
    module = parse_module(TEXT.replace("MEMORY", str(memory)).replace("gpus = 4", "gpus = 3"))
    assert module.cluster is not None
    slow: Attributes = module.cluster.attrs.updated(slowed=slowed or None)
    rows = [request(number, SHAPES[2], guidance=5.0) for number in range(count)]
    return sampling_module(
        rows, tokens, module.stages, ("large", "small"), replace(module.cluster, attrs=slow),
        switch="fixed=4", forecasts=[SwitchForecast(4, 4, 4)] * count, branches=lambda name, r: 2,
    )  # fmt: skip


def costed(slowed: tuple[tuple[int, float], ...], memory: int = 80) -> tuple[CostModel, Module]:
    module = Pipeline.parse("segment,annotate").run(traced(slowed, memory=memory))
    return CostModel(module), module


@pytest.mark.parametrize(("slowed", "way", "ranks"), [
    (((0, 4.0),), Attention(2, 1), (0,)),
    (((1, 4.0), (2, 4.0)), Attention(2, 1), (1, 2)),
    (((2, 3.0),), Attention(1, 1), (2,)),
])  # fmt: skip
def test_a_step_takes_what_its_slower_branch_does(
    slowed: tuple[tuple[int, float], ...], way: Attention, ranks: tuple[int, ...]
) -> None:
    cost, module = costed(slowed)
    guided = next(cascade for cascade in module.cascades if cascade.stage == "large")
    entry = cost.table.entry(guided, 3, (0, 1, 2), Strategy(side=2, unconditional=way))
    last = way if len(ranks) == way.ulysses * way.ring else None
    alone = cost.table.entry(guided.with_attrs(branches=None), len(ranks), ranks, Strategy(last, side=1))
    gathered = cost.table.communication.exchange(guided, 3, (0, 1, 2))
    assert entry.time == pytest.approx(alone.time + gathered)


def test_of_equal_ranks_no_uneven_way_is_tried_and_none_would_be_faster() -> None:
    cost, module = costed(())
    for guided in (cascade for cascade in module.cascades if cascade.phase is Phase.DENOISE):
        assert all(way.unconditional is None for degree in (1, 2, 3) for way in cost.table.ways(guided, degree))
        uneven = cost.table.entry(guided, 3, None, Strategy(side=2, unconditional=Attention(1, 1))).time
        assert uneven >= min(cost.time(guided, degree) for degree in (2, 3))


def test_a_fast_rank_and_two_slow_ones_have_a_branch_each() -> None:
    module = traced(((1, 2.0), (2, 2.0)))
    plan = Pipeline.parse("segment,annotate,schedule-sampling{steps=20},place,lower,check").run(module)
    large = {cascade.name: cascade for cascade in plan.cascades if cascade.stage == "large"}
    batched = CostModel(plan).table.entry(next(iter(large.values())), 3, (0, 1, 2), Strategy(side=1))
    assert all(cascade.end - cascade.start < batched.time for cascade in large.values())


@pytest.mark.parametrize(("memory", "sides"), [(80, (1, 2)), (31, (3,))])
def test_a_way_that_needs_more_than_was_planned_is_taken_where_all_models_leave_room(
    memory: int, sides: tuple[int, ...]
) -> None:
    """Of 31 GiB the large model leaves room for branches apart, both models leave none: batched, as it was planned."""
    cost, module = costed(((1, 2.0), (2, 2.0)), memory)
    guided = next(cascade for cascade in module.cascades if cascade.stage == "large")
    whole = guided.with_attrs(degree=3, start=Quantity(0.0, "ms"), end=Quantity(1.0, "ms"))
    placed = with_ranks(whole, (0, 1, 2), cost, 0)
    assert placed.sides == sides


APART = (0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13)  # six ranks of each node
TOGETHER = (6, 7, *range(8, 16))


@pytest.mark.parametrize("ranks", [APART, APART[::-1], TOGETHER, TOGETHER[::-1], (*APART[3:], 14, 15)])
def test_no_way_to_divide_the_ranks_among_the_branches_is_faster(ranks: tuple[int, ...]) -> None:
    """Of all numbers of ranks and all products of Ulysses and ring for the second branch."""
    module = costed(((1, 2.0),))[1]
    assert module.cluster is not None
    pod = module.cluster.attrs.updated(nodes=2, gpus=8, inter=Quantity(20.0, "GB/s"))
    stages = tuple(replace(stage, attrs=stage.attrs.updated(heads=12)) for stage in module.stages)
    cost = CostModel(replace(module, cluster=replace(module.cluster, attrs=pod), stages=stages))
    guided = next(cascade for cascade in module.cascades if cascade.stage == "large")
    every = [
        Strategy(side=2, unconditional=Attention(ulysses, count // ulysses))
        for count in range(1, len(ranks))
        for ulysses in range(1, count + 1)
        if count % ulysses == 0
    ]
    tried, least = (
        min(cost.table.entry(guided, len(ranks), ranks, way).time for way in ways)
        for ways in (cost.table.ways(guided, len(ranks), ranks), every)
    )
    assert tried <= least * (1 + 1e-9)


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_of_even_branches_the_one_with_the_slow_rank_counts(slow: int) -> None:
    """Whichever half of the ranks it is in."""
    module = costed(((slow, 4.0),))[1]
    assert module.cluster is not None
    four = replace(module, cluster=replace(module.cluster, attrs=module.cluster.attrs.updated(gpus=4)))
    cost = CostModel(four)
    guided = next(cascade for cascade in module.cascades if cascade.stage == "large")
    half = (0, 1) if slow in (0, 1) else (2, 3)
    alone = cost.table.entry(guided.with_attrs(branches=None), 2, half, Strategy(Attention(2, 1), side=1))
    both = cost.table.entry(guided, 4, (0, 1, 2, 3), Strategy(Attention(2, 1), side=2))
    assert both.time == pytest.approx(alone.time + cost.table.communication.exchange(guided, 4, (0, 1, 2, 3)))
