"""The scheduler against known optima, brute force, and its own independent checker."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.bound import longest_chain, lower_bound
from arachnec.solver.budget import OPERATIONS_PER_MS as MS
from arachnec.solver.budget import Clock
from arachnec.solver.list_schedule import list_schedule, list_schedules, orders
from arachnec.solver.problem import Choice, Effort, Job, Problem, Schedule, violations
from arachnec.solver.search import solve
from arachnec.solver.z3_proof import Answer, Question

# Durations in 10 ms at degree 1, 2, 4, 8 of VAE and DiT (degree 2, 4, 8 where there are three).
FOUR_TASKS = (
    ((4120, 2510, 1440, 880), (2984, 1526, 773, 394)),
    ((5276, 2804, 1570, 1003), (4520, 2281, 1155, 583)),
    ((5290, 3160, 1650), (7480, 4035, 1836)),
    ((6377, 3001, 1729), (9294, 4270, 2158)),
)


def four_tasks(gpus: int) -> Problem:
    jobs: list[Job] = []
    for vae, dit in FOUR_TASKS:
        degrees = (1, 2, 4, 8)[-len(vae) :]
        jobs.append(Job(tuple(map(Choice, degrees, vae))))
        jobs.append(Job(tuple(map(Choice, degrees, dit)), (len(jobs) - 1,)))
    return Problem(tuple(jobs), gpus)


@pytest.mark.parametrize(("gpus", "optimum", "area"), [(8, 9107, 8906), (16, 4996, 4453)])
def test_the_four_tasks_are_solved_and_proved(gpus: int, optimum: int, area: int) -> None:
    problem = four_tasks(gpus)
    solution = solve(problem, Clock(0.0, 0.0, steps=20_000.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert solution.schedule.makespan(problem) == optimum
    assert solution.proved and solution.bound == optimum
    assert area <= solution.area_bound <= optimum


@pytest.mark.parametrize(("gpus", "optimum"), [(8, 9107), (16, 4996)])
def test_z3_alone_draws_the_line_at_the_optimum(gpus: int, optimum: int) -> None:
    problem = four_tasks(gpus)
    answer, schedule = Question(problem, 1).answer(optimum, Effort(steps=20000 * MS))
    assert answer is Answer.POSSIBLE and schedule is not None
    assert violations(problem, schedule) == []
    assert schedule.makespan(problem) <= optimum
    assert Question(problem, 1).answer(optimum - 1, Effort(steps=20000 * MS))[0] is Answer.IMPOSSIBLE


@st.composite
def problems(draw: st.DrawFn, most_jobs: int = 3, most_ticks: int = 3) -> Problem:
    gpus = draw(st.integers(1, 4))
    jobs: list[Job] = []
    for index in range(draw(st.integers(1, most_jobs))):
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1, max_size=3)))
        ticks = sorted(draw(st.sets(st.integers(1, most_ticks + 1), min_size=1, max_size=len(degrees))), reverse=True)
        before = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        jobs.append(Job(tuple(map(Choice, degrees, ticks)), tuple(sorted(before))))
    return Problem(tuple(jobs), gpus)


def brute_force(problem: Problem) -> int:
    """The optimum by trying every choice and every whole start time."""
    horizon = sum(job.choices[0].ticks for job in problem.jobs)
    best = horizon
    for picks in itertools.product(*(range(len(job.choices)) for job in problem.jobs)):
        for starts in itertools.product(range(horizon), repeat=len(problem.jobs)):
            schedule = Schedule(picks, starts)
            if schedule.makespan(problem) < best and not violations_slowly(problem, schedule):
                best = schedule.makespan(problem)
    return best


def violations_slowly(problem: Problem, schedule: Schedule) -> bool:
    """Tick by tick, knowing nothing of events."""
    runs = [
        (start, start + job.choices[pick].ticks, job.choices[pick].degree)
        for job, pick, start in zip(problem.jobs, schedule.picks, schedule.starts, strict=True)
    ]
    late = any(runs[i][1] > runs[j][0] for j, job in enumerate(problem.jobs) for i in job.before)
    ticks = range(max(end for _, end, _ in runs))
    return late or any(sum(d for start, end, d in runs if start <= t < end) > problem.gpus for t in ticks)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_what_is_proved_optimal_is_what_brute_force_finds(problem: Problem) -> None:
    solution = solve(problem, Clock(0.0, 0.0, steps=10_000.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert solution.proved
    assert solution.schedule.makespan(problem) == brute_force(problem)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_no_schedule_is_shorter_than_the_lower_bound(problem: Problem) -> None:
    bound = lower_bound(problem)
    assert longest_chain(problem) <= bound <= brute_force(problem)


@settings(max_examples=100, deadline=None)
@given(problems(most_jobs=12, most_ticks=50))
def test_every_heuristic_schedule_is_valid(problem: Problem) -> None:
    bound = lower_bound(problem)
    first = min(list_schedules(problem, bound), key=lambda one: one.makespan(problem))
    assert violations(problem, first) == []
    assert bound <= first.makespan(problem)
    for order in orders(problem, first.picks):
        assert violations(problem, list_schedule(problem, first.picks, order)) == []


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_the_checker_agrees_with_one_that_counts_tick_by_tick(problem: Problem, data: st.DataObject) -> None:
    picks = tuple(data.draw(st.integers(0, len(job.choices) - 1)) for job in problem.jobs)
    starts = tuple(data.draw(st.integers(0, 8)) for _ in problem.jobs)
    schedule = Schedule(picks, starts)
    assert bool(violations(problem, schedule)) == violations_slowly(problem, schedule)


def many(jobs: int, gpus: int) -> Problem:
    """Encoder and transformer pairs of many lengths."""
    pairs: list[Job] = []
    for index in range(jobs):
        length = 1000 + (index * 7919) % 5000
        pairs.append(Job((Choice(1, length // 10),)))
        degrees = [degree for degree in (1, 2, 4, 8, 16) if degree <= gpus]
        pairs.append(Job(tuple(Choice(d, length * (20 + d) // (20 * d)) for d in degrees), (2 * index,)))
    return Problem(tuple(pairs), gpus)


def test_a_budget_of_zero_gives_a_valid_schedule() -> None:
    problem = many(40, 16)
    solution = solve(problem, Clock(0.0, 0.0, steps=0.0), seed=0)
    assert violations(problem, solution.schedule) == []
    assert solution.schedule.makespan(problem) < 1.3 * solution.bound


def test_equal_seeds_and_steps_give_equal_schedules() -> None:
    for problem in (four_tasks(8), many(20, 8)):
        runs = [solve(problem, Clock(0.0, 0.0, steps=60), seed=5) for _ in range(2)]
        assert runs[0] == runs[1]
