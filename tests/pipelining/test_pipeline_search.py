"""Partition, placement and schedule together: valid, within every rank's memory, and better than even cuts."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.csv_format import require_valid
from arachnec.pipelining.evaluate import evaluate, held
from arachnec.pipelining.pipeline_model import (
    LayerCosts,
    PipelineInstance,
    PipelinePlan,
    order_problem,
    performance,
)
from arachnec.pipelining.pipeline_search import balanced_sizes, even_sizes, find_plan, interleaved, wave
from arachnec.pipelining.schedules import interleaved_1f1b, one_f_one_b

INFINITE = float("inf")


def layer(work: float, saved: float = 1, state: float = 0, output: float = 0) -> LayerCosts:
    return LayerCosts(work, work, work, saved, state, output)


@st.composite
def instances(draw: st.DrawFn) -> PipelineInstance:
    ranks = draw(st.integers(1, 4))
    number = st.integers(1, 9)
    layers = tuple(
        LayerCosts(draw(number), draw(number), draw(number), draw(number), draw(number), draw(number))
        for _ in range(draw(st.integers(ranks, 10)))
    )
    memory = tuple(draw(st.integers(60, 200)) for _ in range(ranks))
    speeds = tuple(draw(st.sampled_from([1.0, 2.0])) for _ in range(ranks))
    bandwidth = draw(st.sampled_from([INFINITE, 1.0]))
    return PipelineInstance(layers, draw(st.integers(1, 5)), speeds, memory, bandwidth, draw(st.sampled_from([0, 0.5])))


@settings(max_examples=15)
@given(instances())
def test_a_plan_is_valid_and_no_rank_holds_more_than_its_memory(instance: PipelineInstance) -> None:
    try:
        search = find_plan(instance, tries=8)
    except UserError as refused:
        assert "fits into the memory" in str(refused)
        return
    plan = search.plan
    require_valid(plan.schedule, len(plan.sizes), instance.micro_batches)
    assert plan.schedule.placement == plan.placement
    assert sum(plan.sizes) == len(instance.layers)
    assert min(plan.sizes) >= 1
    assert all(most <= own * (1 + 1e-9) for most, own in zip(search.performance.memory, instance.memory, strict=True))
    assert search.performance == performance(instance, plan)
    assert find_plan(instance, tries=8) == search


@given(instances(), st.integers(1, 2))
def test_the_model_takes_the_exact_times_apart(instance: PipelineInstance, v: int) -> None:
    ranks = instance.ranks
    if len(instance.layers) < v * ranks or instance.micro_batches % max(1, instance.micro_batches // ranks):
        return
    sizes = even_sizes(len(instance.layers), v * ranks)
    plan = PipelinePlan(sizes, interleaved(ranks, v), interleaved_1f1b(ranks, instance.micro_batches, v))
    costs = performance(instance, plan)
    for busy, waits in zip(costs.compute, costs.bubble, strict=True):
        assert busy + waits == pytest.approx(costs.makespan)
    work = sum(layer.forward + layer.activation_gradient + layer.weight_gradient for layer in instance.layers)
    assert sum(b * s for b, s in zip(costs.compute, instance.speeds, strict=True)) == pytest.approx(
        work * instance.micro_batches
    )
    assert 0 <= costs.exposed <= costs.makespan
    if instance.bandwidth == INFINITE and not instance.latency:
        assert costs.exposed == sum(costs.communication) == 0
    state = sum(layer.state for layer in instance.layers)
    activations = held(plan.schedule, order_problem(instance, sizes, plan.placement).saved)
    assert sum(costs.memory) == pytest.approx(state + sum(activations))


def test_every_bottleneck_is_named() -> None:
    def named(layers: list[LayerCosts], memory: float = INFINITE, bandwidth: float = INFINITE) -> str:
        instance = PipelineInstance(tuple(layers), 8, (1.0, 1.0), (memory,) * 2, bandwidth)
        return performance(instance, PipelinePlan((1, len(layers) - 1), (0, 1), one_f_one_b(2, 8))).bottleneck

    assert named([layer(1), layer(9)]) == "compute"
    assert named([layer(1), layer(1)]) == "bubble"
    assert named([layer(1, output=50), layer(1)], bandwidth=10) == "communication"
    assert named([layer(1, state=10), layer(1)], memory=5) == "memory"


@pytest.mark.parametrize("placement", [interleaved(2, 1), wave(2, 2), interleaved(3, 1), interleaved(2, 2)])
@pytest.mark.parametrize("works", [(1, 2, 3, 4, 5, 6), (9, 1, 1, 1, 1, 1), (5, 1, 1, 5, 1, 1, 5), (1, 1, 1, 1, 8)])
def test_balanced_cuts_are_the_best_of_all_cuts(placement: tuple[int, ...], works: tuple[int, ...]) -> None:
    ranks = 1 + max(placement)
    instance = PipelineInstance(tuple(map(layer, works)), 1, (1.0,) * ranks, (INFINITE,) * ranks)

    def busiest(sizes: tuple[int, ...]) -> float:
        rows = order_problem(instance, sizes, placement).times.forward
        return max(
            sum(row[0] for row, rank in zip(rows, placement, strict=True) if rank == own) for own in range(ranks)
        )

    stages = len(placement)
    least = min(
        busiest(tuple(b - a for a, b in zip((0, *cuts), (*cuts, len(works)), strict=True)))
        for cuts in combinations(range(1, len(works)), stages - 1)
    )
    assert busiest(balanced_sizes(instance, placement)) == least


def test_partition_and_placement_take_each_ranks_speed_and_memory() -> None:
    layers = tuple(layer(1, saved=0, state=10) for _ in range(12))
    fast = find_plan(PipelineInstance(layers, 8, (3.0, 1.0), (INFINITE,) * 2), tries=20)
    given_layers = [
        sum(size for size, rank in zip(fast.plan.sizes, fast.plan.placement, strict=True) if rank == own)
        for own in range(2)
    ]
    assert given_layers == [9, 3]
    small = find_plan(PipelineInstance(layers, 8, (1.0, 1.0), (40.0, 200.0)), tries=20)
    assert small.performance.memory[0] <= 40


def test_a_heavy_head_is_planned_around_in_the_memory_of_interleaved_1f1b() -> None:
    """Gemma-2's kind: 26 layers and a head as heavy as seven of them, 4 ranks, 8 micro-batches."""
    works = [172] * 26 + [1180]
    even = (4, 4, 3, 3, 3, 3, 3, 4)
    free = PipelineInstance(tuple(map(layer, works)), 8, (1.0,) * 4, (INFINITE,) * 4)
    problem = order_problem(free, even, interleaved(4, 2))
    baseline = interleaved_1f1b(4, 8, 2)
    memory = max(held(baseline, problem.saved))
    instance = PipelineInstance(free.layers, 8, free.speeds, (memory,) * 4)
    search = find_plan(instance, tries=10)
    assert max(search.performance.memory) <= memory
    assert search.performance.makespan * 1.3 <= evaluate(baseline, problem.times).makespan


def test_placements() -> None:
    assert interleaved(3, 2) == (0, 1, 2, 0, 1, 2)
    assert wave(3, 2) == (0, 1, 2, 2, 1, 0)
    assert wave(2, 3) == (0, 1, 1, 0, 0, 1)
    for layers, stages in product(range(1, 12), range(1, 6)):
        if layers >= stages:
            assert sum(even_sizes(layers, stages)) == layers


def test_what_fits_nowhere_and_too_many_ranks_are_refused() -> None:
    for instance, message in (
        (PipelineInstance((layer(1),) * 4, 2, (1.0,) * 2, (0.5,) * 2), "fits into the memory of 2 ranks"),
        (PipelineInstance((layer(1),) * 4, 2, (1.0,) * 5, (9.0,) * 5), "a pipeline of 5 ranks for 4 layers"),
    ):
        with pytest.raises(UserError, match=message):
            find_plan(instance)


@settings(max_examples=15)
@given(instances())
def test_a_plan_is_no_longer_than_even_cuts_in_1f1b(instance: PipelineInstance) -> None:
    sizes = even_sizes(len(instance.layers), instance.ranks)
    order = one_f_one_b(instance.ranks, instance.micro_batches)
    even = performance(instance, PipelinePlan(sizes, interleaved(instance.ranks, 1), order))
    if even.bottleneck != "memory":
        assert find_plan(instance, tries=8).performance.makespan <= even.makespan * (1 + 1e-9)
