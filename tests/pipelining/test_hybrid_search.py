"""DAPPLE's plans: the published numbers, and no plan of any cuts and replicas is better, by brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.limits import MOST_LAYERS
from arachnec.pipelining.hybrid_plan import (
    POLICIES,
    HybridPlan,
    Instance,
    Machines,
    Stage,
    allocate,
    allocations,
    hybrid_plan,
)
from arachnec.pipelining.hybrid_search import best_plan, dapple_plan, pipedream_plan
from arachnec.pipelining.profile_file import Layer, LayerProfile, read_profile, read_profile_file
from tests.pipelining.bert_profile import V100, bert_instance, line


@pytest.mark.parametrize(("last", "speed_up"), [(23, 10.60), (22, 10.34), (24, 10.32), (21, 10.08)])
def test_berts_published_plan_and_its_neighbours_to_the_second_decimal(last: int, speed_up: float) -> None:
    instance = bert_instance()
    names = [layer.name for layer in instance.profile.layers]
    cut = names.index(f"layer_{last}") + 1
    plan = hybrid_plan(instance, (Stage(0, cut, (8, 0)), Stage(cut, instance.layers, (0, 8))))
    assert plan.micro_batches == 32
    assert round(plan.speed_up, 2) == speed_up


def test_the_search_finds_at_least_the_published_plan() -> None:
    instance = bert_instance()
    published = hybrid_plan(instance, (Stage(0, 28, (8, 0)), Stage(28, instance.layers, (0, 8))))
    assert best_plan(instance).latency <= published.latency
    assert dapple_plan(instance).block <= published.block


def test_inputs_of_the_model_cross_no_cut_and_a_skip_crosses_all_that_it_spans() -> None:
    text = "\n".join(
        [
            line("node0", "input", 0, 0, 100, 0),
            line("node1", "stem", 1, 1, 10, 0),
            line("node2", "body", 1, 1, 20, 0),
            line("node3", "head", 1, 1, 5, 0),
            "\tnode0 -- node1",
            "\tnode0 -- node3",
            "\tnode1 -- node2",
            "\tnode2 -- node3",
            "\tnode1 -- node3",
        ]
    )
    assert read_profile(text, "skip.txt").cuts == (0, 10, 30)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (4, 0, 1), (4, 2, 0), (-4, 2, 2), (4, -2, 2), (5, 2, 2), (2, 4, 2)])
def test_a_batch_has_whole_micro_batches_of_at_least_a_clip(sizes: tuple[int, int, int]) -> None:
    profile = LayerProfile((Layer("l", 1.0, 1.0, 0.0, 0.0),), ())
    with pytest.raises(UserError, match="has no whole number of micro-batches"):
        Instance(profile, Machines(1, 1), *sizes)
    for fitting in ((4, 2, 1), (1, 1, 7), (6, 6, 2)):
        assert Instance(profile, Machines(1, 1), *fitting).batch == fitting[0]


@pytest.mark.parametrize("machines", [Machines(0, 1), Machines(1, 0), Machines(-1, 2), Machines(2, -1)])
def test_a_plan_needs_a_device(machines: Machines) -> None:
    with pytest.raises(UserError, match=r"a plan for .* machines of .* devices"):
        Instance(LayerProfile((Layer("l", 1.0, 1.0, 0.0, 0.0),), ()), machines, 2, 1, 1)


@st.composite
def instances(draw: st.DrawFn, most_layers: int = 8) -> Instance:
    number = st.integers(0, 20)
    layers = tuple(
        Layer(f"l{k}", draw(number), draw(number), draw(number) * 1e6, draw(number) * 1e7)
        for k in range(draw(st.integers(1, most_layers)))
    )
    cuts = tuple(draw(st.integers(0, 30)) * 1e6 for _ in layers[1:])
    machines = Machines(*draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (1, 6), (2, 3), (3, 2), (6, 1), (5, 1)])))
    return Instance(LayerProfile(layers, cuts), machines, draw(st.sampled_from([2, 4, 12, 16])), 2, 2)


def all_plans(instance: Instance) -> Iterator[HybridPlan]:
    """Every number of pipelines, every cut, all replicas, and per stage every policy."""
    machines, devices = instance.machines.count, instance.machines.devices
    for pipelines in range(1, machines * devices + 1):
        if instance.micro_batches(pipelines) is None:
            continue
        if machines % pipelines == 0:
            yield from plans_of_one(instance, pipelines, pipelines > 1, machines // pipelines, devices)
        if devices % pipelines == 0 and pipelines > 1:
            yield from plans_of_one(instance, pipelines, False, machines, devices // pipelines)


Placements = Callable[[tuple[int, ...], int, int], Iterable[tuple[int, ...]]]


def by_policy(used: tuple[int, ...], devices: int, count: int) -> set[tuple[int, ...]]:
    return {allocate(policy, used, devices, count) for policy in POLICIES}


def in_any_way(used: tuple[int, ...], devices: int, count: int) -> Iterator[tuple[int, ...]]:
    for taken in product(*(range(devices - there + 1) for there in used)):
        if sum(taken) == count:
            yield taken


def plans_of_one(
    instance: Instance, pipelines: int, apart: bool, machines: int, devices: int, placements: Placements = by_policy
) -> Iterator[HybridPlan]:
    def placed(cuts: tuple[int, ...], stages: tuple[Stage, ...], used: tuple[int, ...]) -> Iterator[tuple[Stage, ...]]:
        if len(stages) == len(cuts):
            yield stages
            return
        first = stages[-1].last if stages else 0
        left = machines * devices - sum(used) - (len(cuts) - len(stages) - 1)
        for count in range(1, left + 1):
            for devices_of in placements(used, devices, count):
                total = tuple(a + b for a, b in zip(used, devices_of, strict=True))
                yield from placed(cuts, (*stages, Stage(first, cuts[len(stages)], devices_of)), total)

    for count in range(1, min(instance.layers, machines * devices) + 1):
        for inner in combinations(range(1, instance.layers), count - 1):
            for stages in placed((*inner, instance.layers), (), (0,) * machines):
                yield hybrid_plan(instance, stages, pipelines, apart)


@settings(max_examples=25)
@given(instances(6))
def test_no_plan_has_a_smaller_latency_or_block(instance: Instance) -> None:
    every = range(1, 7)
    ours, published = best_plan(instance, every), dapple_plan(instance, every)
    plans = list(all_plans(instance))
    single = [plan for plan in plans if plan.pipelines == 1]
    assert best_plan(instance).latency <= min(plan.latency for plan in single) * (1 + 1e-9)
    assert dapple_plan(instance).block == pytest.approx(min(plan.block for plan in single), rel=1e-9)
    assert ours.latency <= min(plan.latency for plan in plans) * (1 + 1e-9)
    same = [plan for plan in plans if (plan.pipelines, plan.apart) == (published.pipelines, published.apart)]
    assert published.block == pytest.approx(min(plan.block for plan in same), rel=1e-9)
    assert pipedream_plan(instance).latency >= ours.latency


@settings(max_examples=25)
@given(instances(5))
def test_on_few_devices_no_placement_is_better_whatever_the_policies_say(instance: Instance) -> None:
    machines = instance.machines
    plans = plans_of_one(instance, 1, False, machines.count, machines.devices, in_any_way)
    assert best_plan(instance).latency <= min(plan.latency for plan in plans) * (1 + 1e-9)


def test_a_plan_that_no_policy_comes_to() -> None:
    """One stage alone in the first machine, and the two that send much to each other in the second."""
    layers = tuple(Layer(f"l{k}", 4.0, 8.0, 0.0, 1e9) for k in range(3))
    instance = Instance(LayerProfile(layers, (0.0, 1e6)), Machines(2, 2, send=1e6, inside=1e9), 8, 1, 8)
    apart = hybrid_plan(instance, (Stage(0, 1, (1, 0)), Stage(1, 2, (0, 1)), Stage(2, 3, (0, 1))))
    policies = min(plan.latency for plan in plans_of_one(instance, 1, False, 2, 2))
    assert best_plan(instance).latency == apart.latency < policies


def test_eight_layers_on_six_devices_by_brute_force() -> None:
    """The largest size that the brute force covers in a second, with unequal everything."""
    layers = tuple(Layer(f"l{k}", 3 + k % 3, 5 + k % 2, 2e6 * k, 3e8 / (1 + k)) for k in range(8))
    for machines in (Machines(1, 6), Machines(3, 2)):
        instance = Instance(LayerProfile(layers, tuple(1e6 * (9 - k) for k in range(7))), machines, 12, 2, 2)
        least = min(plan.latency for plan in all_plans(instance))
        assert best_plan(instance, range(1, 7)).latency == pytest.approx(least, rel=1e-9)


def least_bottlenecks(instance: Instance) -> list[float]:
    """PipeDream's recurrence as it is published, by number of devices."""
    machines, m = instance.machines, instance.batch // instance.micro_batch
    count = machines.count * machines.devices
    least = [[0.0, *[inf] * count]]
    for last in range(1, instance.layers + 1):
        row = [inf] * (count + 1)
        for n, first in product(range(1, count + 1), range(last)):
            crossing = instance.profile.cuts[first - 1] * instance.batch / instance.profile_batch if first else 0.0
            size = instance.parameters[last] - instance.parameters[first]
            for replicas in range(1, n + 1):
                reduce = 2e3 * (replicas - 1) * size / machines.reduce
                own = max(instance.time(first, last) / m, reduce) / replicas
                row[n] = min(row[n], max(least[first][n - replicas], own, 2e3 * crossing / machines.send / m))
        least.append(row)
    return least[instance.layers]


@given(instances())
def test_pipedreams_partition_has_the_least_bottleneck(instance: Instance) -> None:
    machines, m = instance.machines, instance.batch // instance.micro_batch
    bottleneck = 0.0
    for stage in pipedream_plan(instance).stages:
        cut = instance.profile.cuts[stage.first - 1] if stage.first else 0.0
        size = instance.parameters[stage.last] - instance.parameters[stage.first]
        reduce = 2e3 * (stage.replicas - 1) * size / machines.reduce
        own = max(instance.time(stage.first, stage.last) / m, reduce) / stage.replicas
        sent = 2e3 * cut * instance.batch / instance.profile_batch / machines.send / m
        bottleneck = max(bottleneck, own, sent)
    assert bottleneck == pytest.approx(min(least_bottlenecks(instance)), rel=1e-12)


def test_the_three_policies() -> None:
    used = (3, 0, 0)
    assert allocate("fresh-first", used, 4, 5) == (0, 4, 1)
    assert allocate("append-first", used, 4, 5) == (1, 4, 0)
    assert allocate("scatter-first", (2, 1, 0), 4, 4) == (2, 2, 0)
    assert allocate("scatter-first", (0, 0, 0), 4, 6) == (2, 2, 2)
    for taken, count in product(product(range(3), repeat=2), range(1, 5)):
        if sum(taken) + count <= 4:
            for allocation in allocations(taken, 2, count):
                assert sum(allocation) == count
                assert all(a + b <= 2 for a, b in zip(taken, allocation, strict=True))


GOOD = line("node0", "a", 1, 1, 1, 1) + "\n" + line("node1", "b", 1, 1, 1, 1) + "\n\tnode0 -- node1\n"
BAD = {
    "": "the profile has no layer",
    "\n\n": "the profile has no layer",
    GOOD + "\tnode1 -- node0\n": "read each other in a cycle: node",
    GOOD + "\tnode1 -- node1\n": "read each other in a cycle: node",
    GOOD + "\tnode1 -- node7\n": "an edge names `node7`",
    GOOD + line("node1", "c", 1, 1, 1, 1): "`node1` stands twice",
    GOOD + line("node2", "c", -1, 1, 1, 1): ": negative",
    GOOD + line("node2", "c", 1, 1, 1, -8): ": negative",
    GOOD + line("node2", "c", float("nan"), 1, 1, 1): ": not finite",
    GOOD + line("node2", "c", 1, 1, float("inf"), 1): ": not finite",
    GOOD + line("node2", "c", 1e308, 1, 1, 1): ": above",
    GOOD.replace("forward_compute_time=1", "forward_compute_time=x", 1): ": no number",
    GOOD.replace("forward_compute_time=1, ", "", 1): "no node and no edge",
    GOOD + "node2 is a layer": "no node and no edge",
    GOOD + "node2 -- " + "x" * 10_000: "no node and no edge",
    "\n".join(f"node{k} -- l -- x=1" for k in range(1_000_000)): "the profile has more than",
    GOOD + "\tnode0 -- node1\n" * 1_000_000: "the profile has more than",
}


@pytest.mark.parametrize("number", range(len(BAD)))
def test_every_bad_profile_has_its_own_error_with_a_place_and_a_remedy(number: int) -> None:
    text, message = list(BAD.items())[number]
    with pytest.raises(UserError) as refused:
        read_profile(text, "bad.txt")
    diagnostic = refused.value.diagnostics[0]
    assert message in diagnostic.message
    assert diagnostic.span is not None
    assert "help: " in render(diagnostic, text[:1000])


def test_a_list_of_sizes_is_summed() -> None:
    text = GOOD.replace("activation_size=1,", "activation_size=[6; 1e1],", 1)
    assert read_profile(text, "good.txt").layers[0].activation == 16
    assert MOST_LAYERS >= 1024


def test_batches_that_do_not_divide_and_clusters_of_nothing_are_refused() -> None:
    profile = read_profile(GOOD, "good.txt")
    for bad in ((V100, 63, 2, 2), (Machines(0, 8), 64, 2, 2)):
        with pytest.raises(UserError):
            Instance(profile, *bad)


def test_a_number_that_stands_twice_is_refused() -> None:
    text = "node1 -- a -- forward_compute_time=1, forward_compute_time=9, backward_compute_time=2, activation_size=3, "
    with pytest.raises(UserError, match="no node and no edge"):
        read_profile(text + "parameter_size=4\n", "bad.txt")


def test_a_byte_order_mark_is_no_part_of_the_first_layer(tmp_path: Path) -> None:
    path = tmp_path / "profile.txt"
    path.write_text(line("node1", "a", 1, 2, 3, 4) + "\n", encoding="utf-8-sig")
    assert len(read_profile_file(path).layers) == 1


@pytest.mark.parametrize("times", [(1, 1, 1, 3), (3, 1, 1, 1), (1, 2, 2, 1), (2, 2, 3, 1, 1, 1)])
def test_pipedreams_partition_balances_what_takes_far_less_than_a_millisecond(times: tuple[int, ...]) -> None:
    """Nothing comes into the first stage from another."""
    layers = tuple(Layer(str(number), 0.01 * time, 0.02 * time, 0.0, 1e9) for number, time in enumerate(times))
    instance = Instance(LayerProfile(layers, (0.0,) * (len(times) - 1)), Machines(2, 1), 4, 1, 1)
    stages = pipedream_plan(instance).stages
    halves = [sum(times[stage.first : stage.last]) for stage in stages]
    assert max(halves) == min(max(sum(times[:cut]), sum(times[cut:])) for cut in range(1, len(times)))
