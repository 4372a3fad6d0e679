"""Ranks for schedules: valid, whole, and near."""

import importlib.util
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import nic_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module, Phase, quantity
from arachnec.ir.values import Quantity
from arachnec.ir.verify import verify
from arachnec.passes.infra.base import Pass
from arachnec.passes.place import Place
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.planning.cascade_ranks import pick_ranks
from arachnec.planning.family_placement import PRICE
from arachnec.planning.formulate import problem_of, with_times
from arachnec.planning.placed_search import Measure
from arachnec.planning.placement import placements
from arachnec.planning.validate import validate_schedule
from arachnec.report import imbalance, plan_report
from arachnec.solver.budget import Clock
from arachnec.solver.list_schedule import list_schedule
from arachnec.solver.portfolio import Incumbent
from arachnec.solver.problem import TICKS, Schedule
from arachnec.solver.static_layouts import one_degree
from tests.planning import costed_modules
from tests.planning.costed_modules import BS, formula

LONGEST_FIRST = Path(__file__).parents[2] / "examples" / "passes" / "longest_first.py"


module = partial(costed_modules.module, encoders=1)


def longest_first() -> type[Pass]:
    spec = importlib.util.spec_from_file_location("longest_first", LONGEST_FIRST)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["longest_first"] = loaded  # dataclasses look their module up
    spec.loader.exec_module(loaded)
    longest_first: type[Pass] = loaded.LongestFirst
    return longest_first


SCHEDULERS = [
    ScheduleZ3(steps=30),
    ScheduleStatic(),
    ScheduleStatic(degree=3),
    ScheduleStatic(policy="data-parallel"),
    longest_first()(),
]


@settings(max_examples=25)
@given(
    st.sampled_from(["4:cpu", "1:h100", "2x8:h100-80g", "3x2:l20"]),
    st.lists(st.integers(50, 6000), min_size=1, max_size=9),
    st.integers(0, 2),
    st.sampled_from(SCHEDULERS),
)
def test_every_scheduler_gives_a_valid_plan_and_place_keeps_it_valid(
    cluster: str, tokens: list[int], encoders: int, scheduler: Pass
) -> None:
    if cluster == "1:h100" and isinstance(scheduler, ScheduleStatic) and scheduler.degree == 3:
        with pytest.raises(UserError, match="on a cluster of 1 GPU"):
            scheduler.run(module(cluster, tokens, encoders=encoders))
        return
    scheduled = scheduler.run(module(cluster, tokens, encoders=encoders))
    assert verify(scheduled) == ()
    assert validate_schedule(scheduled) == []
    placed = Place().run(scheduled)
    assert verify(placed) == ()
    assert validate_schedule(placed) == []
    assert Place().run(scheduled) == placed
    report = plan_report(placed, 1.0)
    assert report["iteration_ms"] >= report["makespan_ms"] >= report["bound_ms"] - 1e-6
    assert 0 <= report["imbalance"] < 1


def test_recomputation_is_chosen_where_the_memory_asks_for_it_and_only_there() -> None:
    planned = ScheduleStatic(policy="data-parallel").run(module("2:cpu", [100, 4000], saved=3e-3))
    short, long = (cascade for cascade in planned.cascades if cascade.phase is Phase.TRAIN)
    assert not short.recomputes
    assert long.recomputes


def test_the_default_is_never_slower_than_a_fixed_layout() -> None:
    for tokens in ([6000, 50, 60, 70, 400], [900] * 9, [5000, 4000, 3000, 80]):
        costed = module("8:h100", tokens)
        ours = plan_report(Place().run(ScheduleZ3(steps=300).run(costed)), 0.0)
        for policy in (ScheduleStatic(), ScheduleStatic(degree=8), ScheduleStatic(policy="data-parallel")):
            assert ours["makespan_ms"] <= plan_report(Place().run(policy.run(costed)), 0.0)["makespan_ms"] + 0.1


def stretched() -> tuple[Measure, Schedule]:
    """Cascades that talk much on five GPUs each, which placing has to put on two nodes."""
    costed = module("8x8:h100", [2000, 9000, 20_000] * 30, encoders=0)
    dit = costed.stages[0]
    talkative = dit.attrs.updated(traffic=formula("GiB", (2e-3, BS)))
    costed = replace(costed, stages=(replace(dit, attrs=talkative),))
    cost = CostModel(costed)
    problem = problem_of(costed, cost)
    awkward = tuple(min(range(len(job.choices)), key=lambda i: abs(job.choices[i].degree - 5)) for job in problem.jobs)
    return Measure(costed, cost, problem), list_schedule(problem, awkward, range(len(problem.jobs)))


def test_a_schedule_that_placing_stretches_gives_way_to_one_that_is_shorter_placed() -> None:
    measure, schedule = stretched()
    problem, clock = measure.problem, Clock(0.0, 0.0, steps=1e6)
    assert measure.of(schedule) > 1.02 * schedule.makespan(problem) / TICKS
    incumbent = Incumbent(problem, schedule, 0, measure.objectives(), measure.sync.least)
    incumbent.offer(schedule, clock)
    before = incumbent.length
    for layout in one_degree(problem):
        incumbent.offer(layout, clock)
    assert incumbent.length == measure.simulated(incumbent.schedule) < before


def test_no_schedule_is_placed_for_which_no_time_is_left() -> None:
    measure, schedule = stretched()
    incumbent = Incumbent(measure.problem, schedule, 0, measure.objectives(), measure.sync.least)
    for layout in one_degree(measure.problem):
        assert not incumbent.offer(layout, Clock(0.0, 0.0, steps=1))
    assert incumbent.schedule == schedule


def test_a_plan_of_many_cascades_is_placed_as_it_was_scheduled() -> None:
    """24 GPUs hold the longest without recomputation, 16 do not; neither is on more nodes than it need be."""
    costed = module("16x8:h100", [700, 2000, 9000, 20_000] * 15, encoders=0)
    dit = costed.stages[0]
    attrs = dit.attrs.updated(heads=24, saved=formula("GiB", (6e-2, BS)))
    costed = replace(costed, stages=(replace(dit, attrs=attrs),))
    scheduled = ScheduleZ3(steps=100).run(costed)
    assert any(cascade.degree == 24 for cascade in scheduled.cascades)
    placed = Place().run(scheduled)
    assert quantity(placed.attrs["makespan"]) <= quantity(scheduled.attrs["makespan"]) * (1 + PRICE)


def test_a_pass_authors_mistake_is_named() -> None:
    costed = module("2:cpu", [100, 200], encoders=0)
    degrees = {cascade.name: 2 for cascade in costed.cascades}
    with pytest.raises(UserError, match="4 ranks are needed"):
        with_times(costed, degrees, {cascade.name: (0.0, 1e6) for cascade in costed.cascades})
    with pytest.raises(UserError, match="%0 runs"):
        with_times(costed, degrees, {"0": (0.0, 1.0), "1": (1.0, 1e6)})
    with pytest.raises(UserError, match="%1 was given no degree"):
        with_times(costed, {"0": 1}, {"0": (0.0, 1e6)})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"start": Quantity(-1.0, "ms")}, "starts at -1.0"),
        ({"end": Quantity(1.0, "ms")}, "needs"),
        ({"degree": 3}, "degree 3 is not legal"),
        ({"ranks": (0, 0)}, "ranks (0, 0)"),
        ({"ranks": (1, 9)}, "of 2"),
        ({"ulysses": 3}, "is not degree"),
    ],
)
def test_the_checker_names_every_kind_of_mistake(change: dict[str, object], expected: str) -> None:
    placed = Place().run(ScheduleStatic(degree=2).run(module("2:h100", [4000], encoders=0)))
    assert validate_schedule(placed) == []
    wrong = placed.cascades[0].with_attrs(**change)  # type: ignore[arg-type]
    assert any(expected in problem for problem in validate_schedule(_with(placed, wrong)))


def test_the_checker_sees_ranks_in_two_cascades_and_inputs_that_are_late() -> None:
    placed = Place().run(ScheduleStatic().run(module("1:h100", [100, 200])))
    first = next(cascade for cascade in placed.cascades if cascade.phase is Phase.TRAIN)
    early = first.with_attrs(start=Quantity(0.0, "ms"))
    problems = " ".join(validate_schedule(_with(placed, early)))
    assert "rank 0 is in" in problems
    assert "before %0 ends" in problems


def _with(module: Module, cascade: Cascade) -> Module:
    return replace(module, cascades=tuple(cascade if c.name == cascade.name else c for c in module.cascades))


@given(st.sampled_from(["2x8:h100-80g", "3x4:l20", "6:cpu"]), st.randoms(use_true_random=False))
def test_ranks_are_on_as_few_nodes_as_they_can_be_and_near_the_inputs_where_that_costs_none(
    name: str, rng: Random
) -> None:
    cluster = parse_cluster(name)
    free = sorted(rng.sample(range(cluster.world), rng.randint(1, cluster.world)))
    degree, near = rng.randint(1, len(free)), rng.choice(free)
    ranks = pick_ranks(cluster, free, degree, {near})
    assert len({*ranks}) == degree and {*ranks} <= {*free}
    by_node = Counter(rank // cluster.gpus for rank in free)
    fewest = next(n for n in range(1, 9) if sum(count for _, count in by_node.most_common(n)) >= degree)
    assert len({rank // cluster.gpus for rank in ranks}) == fewest
    here = [rank for rank in free if rank // cluster.gpus == near // cluster.gpus]
    if degree == 1 or (fewest == 1 and len(here) == cluster.gpus and cluster.gpus % degree == 0):
        assert near in ranks


def test_more_ranks_than_are_free_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranks free"):
        pick_ranks(parse_cluster("2x8:h100-80g"), range(3), 4, set())


def test_between_nodes_devices_on_nics_of_one_letter_are_taken_together() -> None:
    cluster = parse_cluster("2x8:h100-80g")
    nics = [nic_of(cluster, rank) for rank in pick_ranks(cluster, [4, 5, 6, 7, *range(8, 16)], 10, set())[:2]]
    assert nics[0] == nics[1]


def test_imbalance_is_the_mean_share_of_the_longest_that_ranks_wait() -> None:
    assert imbalance([4.0, 4.0]) == 0
    assert imbalance([4.0, 0.0]) == 0.5
    assert imbalance([]) == 0


def test_without_topology_a_cascade_is_spread_over_the_ranks_that_are_free(tmp_path: Path) -> None:
    """Two pairs: with the racks known each has one, without both cross the uplink."""
    file = tmp_path / "racks.toml"
    file.write_text('nodes = 4\ngpus = 1\ndevice = "l20"\nrack = 2\nuplink = "1 GB/s"\n')
    asked = replace(module("4:l20", [4000] * 3, encoders=0), cluster=parse_cluster(file))
    scheduled = [
        cascade.with_attrs(degree=2, start=Quantity(start, "ms"), end=Quantity(start + 10.0, "ms"))
        for cascade, start in zip(asked.cascades, (0.0, 0.0, 1e5), strict=True)
    ]
    cost = CostModel(asked)
    for topology, racks in ((False, 2), (True, 1)):
        placed = placements(scheduled, cost, topology=topology)
        assert [len({rank // 2 for rank in cascade.ranks}) for cascade in placed] == [racks] * 3


def test_groups_that_come_after_narrow_ones_still_stay_in_a_node() -> None:
    costed = module("2x2:h100-80g", [400, 6000, 400, 6000, 20000, 20000], encoders=0)
    cost = CostModel(costed)
    names = [cascade.name for cascade in costed.cascades]
    degrees = dict(zip(names, (1, 1, 1, 1, 2, 2), strict=True))
    takes = [cost.time(cascade, degrees[cascade.name]) for cascade in costed.cascades]
    starts = (0.0, 0.0, 0.0, 0.0, takes[0], takes[1])
    times = {name: (start, start + ms) for name, start, ms in zip(names, starts, takes, strict=True)}
    scheduled = with_times(costed, degrees, times)
    placed = Place().run(scheduled)
    assert validate_schedule(placed) == []
    assert [cascade.ranks[1] - cascade.ranks[0] for cascade in placed.cascades[4:]] == [1, 1]
    assert quantity(placed.attrs["makespan"]) == pytest.approx(max(end for _, end in times.values()))
