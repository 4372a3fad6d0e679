"""Packings in aligned blocks, how they are repaired, and the proof that no other schedule is shorter."""

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arachnec.solver.block_packing import options_of, pack, packings, realize
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import OPERATIONS_PER_MS as MS
from arachnec.solver.budget import Clock
from arachnec.solver.large_neighbourhood import LargeNeighbourhood
from arachnec.solver.problem import Choice, Effort, Job, Problem, violations
from arachnec.solver.search import solve
from arachnec.solver.z3_proof import Answer, Question
from tests.slow import slow

FRAMES = (17, 33, 49, 65, 81, 97, 121)
SLOWDOWN = {1: 1.0, 2: 1.04, 4: 1.08, 8: 1.15, 16: 1.35, 32: 1.6}


def video_mix(clips: int, gpus: int, seed: int, widest: int = 8) -> Problem:
    """Images and clips of three resolutions on a transformer of 5120 x 40; 20,000 tokens per GPU at most."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(clips):
        u = rng.random()
        latent = (rng.choice(FRAMES) - 1) // 4 + 1
        s = rng.choice((1024, 1560, 3600)) if u < 0.35 else latent * (400 if u < 0.6 else 1560 if u < 0.9 else 3600)
        ms = 40 * (4 * 5120 * s**2 + 28 * 5120**2 * s) * 4 / 4e11
        fitting = [d for d in SLOWDOWN if d <= min(gpus, widest) and s / d <= 20_000]
        jobs.append(Job(tuple(Choice(d, round(ms * SLOWDOWN[d] / d * 1e3)) for d in fitting)))
    return Problem(tuple(jobs), gpus)


@st.composite
def problems(draw: st.DrawFn, most_jobs: int = 10, most_ticks: int = 20, *, chained: bool = True) -> Problem:
    gpus = draw(st.integers(1, 9))
    jobs: list[Job] = []
    for index in range(draw(st.integers(1, most_jobs))):
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1, max_size=4)))
        ticks = sorted(draw(st.sets(st.integers(1, most_ticks), min_size=1, max_size=len(degrees))), reverse=True)
        before = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index and chained else set()
        jobs.append(Job(tuple(map(Choice, degrees, ticks)), tuple(sorted(before))))
    return Problem(tuple(jobs), gpus)


@settings(max_examples=200, deadline=None)
@given(problems(most_jobs=20), st.floats(1.0, 2.0))
def test_every_packing_is_a_valid_schedule(problem: Problem, factor: float) -> None:
    options = options_of(problem)
    if options is not None:
        packing = pack(problem, options, int(lower_bound(problem) * factor))
        schedule = realize(problem, packing)
        assert violations(problem, schedule) == []
        if not any(job.before for job in problem.jobs):
            assert schedule.makespan(problem) == max(packing.load)


# A move that leaves as much above the horizon raises the longest load from 21 to 23.
RAISED_BY_A_MOVE = Problem(
    (
        Job((Choice(1, 1),)),
        Job((Choice(1, 14),)),
        Job((Choice(3, 12),)),
        Job((Choice(2, 9), Choice(3, 1)), before=(0, 2)),
    ),
    6,
)


@settings(max_examples=100, deadline=None)
@example(RAISED_BY_A_MOVE, 0)
@given(problems(most_jobs=20), st.integers(0, 5))
def test_the_large_neighbourhood_search_keeps_every_job_once_and_is_never_longer(problem: Problem, seed: int) -> None:
    options = options_of(problem)
    if options is None:
        return
    bound = lower_bound(problem)
    first = list(packings(problem, options, bound))[-1]
    search = LargeNeighbourhood(problem, options, first, bound, rng=random.Random(seed))
    clock = Clock(0.0, 0.0, steps=5)
    while search.run(clock):
        packing = search.packing()
        assert sorted(placed.job for placed in packing.placed) == list(range(len(problem.jobs)))
        assert max(packing.load) < max(first.load)
        schedule = realize(problem, packing)
        assert violations(problem, schedule) == []


def test_a_schedule_that_no_aligned_blocks_can_give_is_found_and_proved() -> None:
    jobs = [Choice(2, 4), Choice(2, 5), Choice(1, 8), Choice(1, 6), Choice(1, 5)]
    problem = Problem(tuple(Job((choice,)) for choice in jobs), 4)
    options = options_of(problem)
    assert options is not None
    assert max(list(packings(problem, options, 10))[-1].load) > 10
    solution = solve(problem, Clock(0.0, 0.0, steps=20_000.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert (solution.schedule.makespan(problem), solution.proved) == (10, True)


@pytest.mark.parametrize(("clips", "seed"), [slow(16, 0), (12, 1)])
def test_two_clips_for_each_of_eight_gpus_are_proved_optimal(clips: int, seed: int) -> None:
    problem = video_mix(clips, 8, seed)
    solution = solve(problem, Clock(0.0, 0.0, steps=300_000.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert solution.proved and solution.bound == solution.schedule.makespan(problem)
    refused = Question(problem, 3).answer(solution.bound - 1, Effort(steps=300_000 * MS))
    assert refused == (Answer.IMPOSSIBLE, None)


@pytest.mark.parametrize(
    ("clips", "gpus", "widest", "gap"),
    [(64, 32, 8, 0.01), (256, 64, 32, 0.01), (128, 64, 8, 0.02), (1024, 256, 8, 0.01)],
)
def test_without_a_budget_a_video_mix_is_planned_close_to_the_bound(
    clips: int, gpus: int, widest: int, gap: float
) -> None:
    problem = video_mix(clips, gpus, 0, widest)
    solution = solve(problem, Clock(0.0, 0.0, steps=0.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert solution.schedule.makespan(problem) <= (1 + gap) * solution.area_bound


def test_what_best_fit_does_not_pack_is_found_and_proved() -> None:
    lengths = (7, 5, 5, 4, 4, 3, 2, 2)  # 16 in each of two bins: 7 5 4 and 5 4 3 2 2
    problem = Problem(tuple(Job((Choice(1, ticks),)) for ticks in lengths), 2)
    solution = solve(problem, Clock(0.0, 0.0, steps=20_000.0), seed=0)
    assert (solution.schedule.makespan(problem), solution.proved) == (16, True)
    assert Question(problem, 0).answer(15, Effort(steps=9000 * MS))[0] is Answer.IMPOSSIBLE


@pytest.mark.parametrize("unit", [1, 10**12 + 7])
def test_times_of_any_size_are_proved_alike(unit: int) -> None:
    problem = Problem(tuple(Job((Choice(1, 7 * unit), Choice(2, 4 * unit))) for _ in range(9)), 4)
    solution = solve(problem, Clock(0.0, 0.0, steps=300_000.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert (solution.schedule.makespan(problem), solution.proved) == (18 * unit, True)
