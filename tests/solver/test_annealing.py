"""Annealing gives valid schedules, never longer than what it starts from, and the same ones for the same seed."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.annealing import anneal
from arachnec.solver.bound import lower_bound
from arachnec.solver.list_schedule import list_schedules
from arachnec.solver.problem import Choice, Job, Problem, Schedule, violations


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Up to eight jobs on up to eight GPUs, some of which wait for an earlier one."""
    gpus = draw(st.integers(1, 8))
    jobs = []
    for index in range(draw(st.integers(1, 8))):
        ticks = draw(st.integers(8, 4000))
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1)))
        choices = tuple(Choice(degree, max(1, ticks // degree + 9 - degree)) for degree in degrees)
        falling = tuple(c for n, c in enumerate(choices) if all(c.ticks < b.ticks for b in choices[:n]))
        before = (draw(st.integers(0, index - 1)),) if index and draw(st.booleans()) else ()
        jobs.append(Job(falling, before))
    return Problem(tuple(jobs), gpus)


def annealed(problem: Problem, seed: int) -> tuple[Schedule, Schedule]:
    start = next(list_schedules(problem, lower_bound(problem)))
    return start, anneal(problem, start, random.Random(seed), lambda tries: tries / 100)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 9))
def test_an_annealed_schedule_is_valid_and_no_longer_than_its_start(problem: Problem, seed: int) -> None:
    start, schedule = annealed(problem, seed)
    assert violations(problem, schedule) == []
    assert lower_bound(problem) <= schedule.makespan(problem) <= start.makespan(problem)


@given(problems())
def test_equal_seeds_anneal_equally(problem: Problem) -> None:
    assert annealed(problem, 3) == annealed(problem, 3)


def test_annealing_goes_through_longer_schedules() -> None:
    """Two jobs beside each other take 60 ticks, one after the other 70; with only one of them changed it is 95."""
    job = Job((Choice(2, 60), Choice(4, 35)))
    problem = Problem((job, job, Job((Choice(2, 40), Choice(4, 20)))), 4)
    start = Schedule((1, 1, 1), (0, 35, 70))
    schedule = anneal(problem, start, random.Random(0), lambda tries: tries / 400)
    assert start.makespan(problem) == 90
    assert schedule.makespan(problem) == 80


def test_no_jobs_and_no_effort_leave_what_is_there() -> None:
    nothing = Problem((), 4)
    assert anneal(nothing, Schedule((), ()), random.Random(0), lambda _: 0.0) == Schedule((), ())
    one = Problem((Job((Choice(1, 5),)),), 4)
    assert anneal(one, Schedule((0,), (3,)), random.Random(0), lambda _: 1.0) == Schedule((0,), (3,))
