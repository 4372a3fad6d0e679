"""Every baseline's schedule is valid and does what its original does; the rules that make each one what it is."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module, Phase, quantity
from arachnec.ir.verify import verify
from arachnec.passes.infra.base import Duration, Pass
from arachnec.passes.place import Place
from arachnec.passes.schedule_dynamic_cp import ScheduleDynamicCp
from arachnec.passes.schedule_flexsp import ScheduleFlexsp
from arachnec.passes.schedule_genetic import ScheduleGenetic
from arachnec.passes.schedule_knapformer import ScheduleKnapformer
from arachnec.passes.schedule_same_bucket import ScheduleSameBucket
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.planning.baselines.flexsp import buckets_of, cut_by_length, solve_groups
from arachnec.planning.baselines.greedy import cuts, dynamic_rounds
from arachnec.planning.family_placement import markup
from arachnec.planning.formulate import problem_of
from arachnec.planning.placed_objective import Following, simulated_ms
from arachnec.planning.placed_search import Measure
from arachnec.planning.validate import validate_schedule
from arachnec.solver.bound import lower_bound
from arachnec.solver.group_rounds import Group, in_rounds, least_loaded, power_sizes, sinks_of, ticks_at
from arachnec.solver.problem import Choice, Job, Problem, violations
from tests.planning import costed_modules

BASELINES: list[Pass] = [
    ScheduleSameBucket(),
    ScheduleSameBucket(degree=2),
    ScheduleDynamicCp(),
    ScheduleDynamicCp(tokens=1000),
    ScheduleKnapformer(),
    ScheduleGenetic(generations=3, population=6),
    ScheduleFlexsp(limit=Duration(200.0)),
    ScheduleFlexsp(limit=Duration(200.0), buckets=2, micro_batches=3),
]


module = partial(costed_modules.module, saved=1e-2, recomputes=False)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["2:h100", "3:h100-80g", "2x4:h100-80g", "3x2:l20"]),
    st.lists(st.integers(50, 4000), min_size=1, max_size=7),
    st.integers(0, 2),
    st.sampled_from(BASELINES),
)
def test_every_baseline_gives_a_valid_plan_of_every_cascade(
    cluster: str, tokens: list[int], encoders: int, baseline: Pass
) -> None:
    costed = module(cluster, tokens, encoders)
    scheduled = baseline.run(costed)
    assert verify(scheduled) == ()
    assert validate_schedule(scheduled) == []
    assert [c.name for c in scheduled.cascades] == [c.name for c in costed.cascades]
    assert quantity(scheduled.attrs["makespan"]) >= quantity(scheduled.attrs["bound"]) - 1e-6
    assert validate_schedule(Place().run(scheduled)) == []


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(50, 4000), min_size=1, max_size=6), st.sampled_from(BASELINES))
def test_the_default_is_never_slower_than_a_baseline(tokens: list[int], baseline: Pass) -> None:
    costed = module("2x4:h100-80g", tokens)
    ours = Place().run(ScheduleZ3(budget=Duration(400.0)).run(costed))
    theirs = Place().run(baseline.run(costed))
    # A part of the makespan alone: the update that follows is most of so short an iteration
    assert priced_iteration(ours) <= priced_iteration(theirs) + 0.001 * priced(theirs)


def priced(placed: Module) -> float:
    """ms of a placed module, with the price of its process groups outside the family."""
    return quantity(placed.attrs["makespan"]) * markup(placed.cascades, CostModel(placed))


def priced_iteration(placed: Module) -> float:
    """ms of the simulated iteration, which the default makes short, with the price of its process groups."""
    following = Following(topology=True, buckets=True, mib=None, reversible=True)
    assert placed.cluster is not None
    simulated = simulated_ms(placed, placed.cluster, list(placed.cascades), following)
    return simulated * markup(placed.cascades, CostModel(placed))


def train(planned: Module) -> list[Cascade]:
    return [cascade for cascade in planned.cascades if cascade.phase is Phase.TRAIN]


def test_nemo_never_runs_two_buckets_at_once() -> None:
    planned = ScheduleSameBucket(degree=1).run(module("4:h100", [900, 100, 900, 900, 100, 100, 2000]))
    runs = sorted((c.start, c.end, c.tokens) for c in train(planned))
    for start, _, tokens in runs:
        assert all(end <= start + 1e-6 or other == tokens for begin, end, other in runs if begin < start)


def test_megatrons_groups_are_powers_of_two_and_no_smaller_than_the_tokens_ask_for() -> None:
    costed = module("16:h100-80g", [4000, 2000, 900, 400, 300, 300, 100])
    problem = problem_of(costed, CostModel(costed))
    work = {sink: float(costed.cascades[sink].tokens ** 2) for sink in sinks_of(problem)}
    wanted = {sink: costed.cascades[sink].tokens / 500 for sink in work}
    rounds = dynamic_rounds(problem, work, wanted)
    for groups in rounds:
        assert sum(group.degree for group in groups) <= 16
        for group in groups:
            assert group.degree in (1, 2, 4, 8, 16)
            assert all(group.degree >= wanted[sink] for sink in group.sinks)
    assert sorted(sink for groups in rounds for group in groups for sink in group.sinks) == sorted(work)


def test_megatron_gives_gpus_that_are_left_to_the_group_with_most_work_first() -> None:
    assert [c.degree for c in train(ScheduleDynamicCp().run(module("8:h100-80g", [3000, 500])))] == [4, 4]
    assert [c.degree for c in train(ScheduleDynamicCp().run(module("6:h100-80g", [3000, 500])))] == [4, 2]


@st.composite
def tables(draw: st.DrawFn) -> Problem:
    jobs = []
    for _ in range(draw(st.integers(1, 5))):
        ticks, smallest = draw(st.integers(4, 40)), draw(st.sampled_from((1, 1, 2, 4)))
        jobs.append(Job(tuple(Choice(d, max(1, ticks * (9 + d) // (9 * d))) for d in (1, 2, 4) if d >= smallest)))
    return Problem(tuple(Job(_falling(job.choices)) for job in jobs), 4)


def _falling(choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
    kept: list[Choice] = []
    for choice in choices:
        if not kept or choice.ticks < kept[-1].ticks:
            kept.append(choice)
    return tuple(kept)


def every_partition(problem: Problem) -> int:
    """The least makespan over all groups of power-of-two sizes and all ways to deal the jobs to them."""
    best = 1 << 60
    sinks = sinks_of(problem)
    ticks = ticks_at(problem, sinks, power_sizes(4))
    for sizes in ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1), (2, 1), (1, 1, 1), (2,), (1,)):
        loads = [0] * len(sizes)

        def go(rest: list[int], loads: list[int], sizes: tuple[int, ...] = sizes) -> int:
            if not rest:
                return max(loads)
            best = 1 << 60
            for g, size in enumerate(sizes):
                needed = ticks[rest[0]][size]
                if needed is not None:
                    best = min(best, go(rest[1:], [load + needed * (g == k) for k, load in enumerate(loads)]))
            return best

        best = min(best, go(sinks, loads))
    return best


@settings(max_examples=25, deadline=None)
@given(tables())
def test_flexsps_program_finds_the_best_groups_and_assignment(problem: Problem) -> None:
    ticks = ticks_at(problem, sinks_of(problem), power_sizes(problem.gpus))
    groups = solve_groups(buckets_of(ticks, 16), problem.gpus, 20.0)
    schedule = in_rounds(problem, [groups])
    assert violations(problem, schedule) == []
    least = every_partition(problem)
    assert least <= schedule.makespan(problem) <= least * 1.002
    assert lower_bound(problem) <= least


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 3))
def test_buckets_and_micro_batches_hold_every_sequence_once_and_never_underestimate(
    lengths: list[int], most: int, count: int
) -> None:
    ticks = {number: {1: 4 * length, 2: 2 * length + 1} for number, length in enumerate(lengths)}
    cut = cut_by_length(ticks, count)
    assert sorted(sink for part in cut for sink in part) == sorted(ticks)
    buckets = buckets_of(ticks, most)
    assert len(buckets) <= most
    assert sorted(sink for bucket in buckets for sink in bucket.sinks) == sorted(ticks)
    for bucket in buckets:
        assert all((bucket.ticks[1] or 0) >= ticks[sink][1] for sink in bucket.sinks)


def test_flexsp_without_time_keeps_the_best_single_degree() -> None:
    costed = module("8:h100-80g", [3000, 500, 400, 2500, 900])
    assert validate_schedule(ScheduleFlexsp(limit=Duration(0.0), micro_batches=1).run(costed)) == []


def test_knapformers_bags_keep_their_sizes() -> None:
    planned = ScheduleKnapformer(bags=(4, 2, 2)).run(module("8:h100-80g", [3000, 500, 400, 2500, 900]))
    assert {cascade.degree for cascade in train(planned)} <= {2, 4}
    assert (1,) * 8 in cuts(8) and (4, 4) in cuts(8) and (4, 2, 2) in cuts(8)
    assert all(sum(sizes) <= 6 for sizes in cuts(6))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 5))
def test_greedy_bags_of_one_size_keep_grahams_bound(lengths: list[int], bags: int) -> None:
    """List scheduling ends at most (1 - 1/m) of the longest job after the mean load (Graham 1966)."""
    groups = least_loaded({sink: {1: length} for sink, length in enumerate(lengths)}, [1] * bags)
    assert groups is not None
    assert sorted(sink for group in groups for sink in group.sinks) == list(range(len(lengths)))
    loads = [sum(lengths[sink] for sink in group.sinks) for group in groups]
    assert max(loads) <= sum(lengths) / bags + max(lengths) * (1 - 1 / bags) + 1e-9


def test_the_genetic_search_is_seeded_and_gets_no_worse_with_generations() -> None:
    costed = module("2x4:h100-80g", [3000, 500, 400, 2500, 900, 60], encoders=1)
    short = ScheduleGenetic(generations=0, population=10).run(costed)
    long = ScheduleGenetic(generations=30, population=10).run(costed)
    assert ScheduleGenetic(generations=30, population=10).run(costed) == long
    assert quantity(long.attrs["makespan"]) <= quantity(short.attrs["makespan"])


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        (ScheduleSameBucket(degree=9), "on a cluster of 8 GPUs"),
        (ScheduleKnapformer(bags=(8, 1)), "bags of 8, 1 GPUs on a cluster of 8"),
        (ScheduleKnapformer(bags=(1, 1)), "no bag of 1, 1 GPUs holds the longest clip"),
        (ScheduleStatic(degree=9), "on a cluster of 8 GPUs"),
    ],
)
def test_an_option_that_cannot_be_is_one_message(baseline: Pass, said: str) -> None:
    with pytest.raises(UserError, match=said):
        baseline.run(module("8:h100-80g", [20_000, 100]))


def test_a_chain_in_no_group_is_an_error() -> None:
    problem = Problem((Job((Choice(1, 5),)), Job((Choice(2, 5),))), 2)
    with pytest.raises(ValueError, match="job 1 is in no group"):
        in_rounds(problem, [[Group(1, (0,))]])
    with pytest.raises(ValueError, match="1 GPUs do not hold job 1"):
        in_rounds(problem, [[Group(1, (0, 1))]])


def test_the_measure_of_a_schedule_is_what_place_gives() -> None:
    costed = module("2x4:h100-80g", [3000, 500, 400, 2500, 900, 60], encoders=1)
    cost = CostModel(costed)
    problem = problem_of(costed, cost)
    ticks = ticks_at(problem, sinks_of(problem), power_sizes(problem.gpus))
    groups = least_loaded(ticks, (4, 2, 2))
    assert groups is not None
    placed = Place().run(ScheduleKnapformer(bags=(4, 2, 2)).run(costed))
    measured = Measure(costed, cost, problem).of(in_rounds(problem, [groups]))
    assert measured == pytest.approx(priced(placed))
