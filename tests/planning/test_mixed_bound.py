"""The bound on nodes that differ holds for every schedule, and is near what plans reach."""

from collections.abc import Iterator
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.formulate import problem_of
from arachnec.planning.lower_bounds import bound_of
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import TICKS


def formula(unit: str, *terms: tuple[float, int]) -> Formula:
    return Formula(tuple(Term(value, (("S", power),) if power else ()) for value, power in terms), unit)


def costed(cluster: str, tokens: list[int], saved: float = 1e-4, traffic: float = 0.0) -> Module:
    dit = Stage(
        "dit",
        True,
        Attributes.of(
            params=1_000_000,
            heads=6,
            attentions=10,
            state=Quantity(4.0, "GiB"),
            forward=formula("ms", (1e-6, 2), (1e-2, 1), (2.0, 0)),
            backward=formula("ms", (2e-6, 2), (2e-2, 1), (4.0, 0)),
            saved=formula("GiB", (saved, 1)),
            saved_recompute=formula("GiB", (saved / 10, 1)),
            traffic=formula("GiB", (traffic, 1)),
            costs="table",
        ),
    )
    clips = tuple(Clip(i, 17, 480, 832, 100, count) for i, count in enumerate(tokens))
    cascades = tuple(Cascade(str(c.id), Phase.TRAIN, "dit", (c.id,), 1, c.tokens, c.text) for c in clips)
    return Module("m", Level.COSTED, parse_cluster(cluster), clips, (dit,), cascades=cascades)


def groups(cascade: Cascade, cost: CostModel) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every set of ranks that can hold a cascade, and how long it takes there, with even shards and with those that
    follow the devices' speeds, or lie between."""
    for degree in range(1, cost.cluster.world + 1):
        for ranks in combinations(range(cost.cluster.world), degree):
            times = []
            for shards in {split(cascade.tokens, ranks, cost, power) for power in (0.0, 0.5, 1.0)}:
                shared = cascade.with_attrs(shards=shards) if degree > 1 else cascade
                recompute = cost.recompute_at(shared, degree, ranks)
                if recompute is not None:
                    times.append(cost.time(shared, degree, ranks=ranks, recompute=recompute))
            if times:
                yield ranks, min(times)


def split(tokens: int, ranks: tuple[int, ...], cost: CostModel, power: float) -> tuple[int, ...]:
    speeds = [cost.devices.slowdown((rank,)) ** -power for rank in ranks]
    ends = [round(tokens * sum(speeds[: n + 1]) / sum(speeds)) for n in range(len(ranks))]
    return tuple(b - a for a, b in zip([0, *ends], ends, strict=False))


def shortest(module: Module) -> float:
    """ms of the shortest of all schedules: every order of the cascades on every set of ranks."""
    cost = CostModel(module)
    able = [list(groups(cascade, cost)) for cascade in module.cascades]
    best = float("inf")
    for order in permutations(range(len(able))):
        for chosen in product(*(able[j] for j in order)):
            free = [0.0] * cost.cluster.world
            for ranks, time in chosen:
                end = max(free[rank] for rank in ranks) + time
                if end >= best:
                    break
                for rank in ranks:
                    free[rank] = end
            else:
                best = max(free)
    return best


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["1x2:h100-80g+1x2:a100-80g", "1x2:h20+1x2:l20", "1x1:h100-80g+2x1:l20", "1x2:l20+1x2:h100-80g"]),
    st.lists(st.integers(300, 40_000), min_size=1, max_size=3),
    st.sampled_from([1e-4, 2e-3]),
    st.sampled_from([0.0, 1e-5, 1e-3]),
)
def test_no_schedule_of_a_few_cascades_is_shorter(
    cluster: str, tokens: list[int], saved: float, traffic: float
) -> None:
    module = costed(cluster, tokens, saved, traffic)
    cost = CostModel(module)
    problem = problem_of(module, cost)
    # the problem rounds each time up by less than a tick
    assert bound_of(module, cost, problem) - len(tokens) <= shortest(module) * TICKS


@pytest.mark.parametrize("slow", ["a100-80g", "l20"])
def test_many_cascades_are_planned_within_a_few_percent_of_it(slow: str) -> None:
    module = costed(f"1x4:h100-80g+1x4:{slow}", [2000 + 1900 * (i % 7) for i in range(60)])
    cost = CostModel(module)
    problem = problem_of(module, cost)
    placed = Pipeline.parse("schedule-z3{steps=20},place").run(module)
    bound, makespan = quantity(placed.attrs["bound"]), quantity(placed.attrs["makespan"])
    assert bound * TICKS == pytest.approx(bound_of(module, cost, problem))
    assert bound <= makespan <= 1.05 * bound
    assert lower_bound(problem) < 0.9 * bound * TICKS, "which counts every device as the fastest"


def test_nodes_that_are_alike_have_the_bound_of_all() -> None:
    module = costed("2x4:h100-80g", [2000, 9000, 40_000])
    cost = CostModel(module)
    problem = problem_of(module, cost)
    assert bound_of(module, cost, problem) == lower_bound(problem)
