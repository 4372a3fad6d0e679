"""The shortest packing in aligned blocks, against every packing there is."""

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.block_packing import options_of, realize
from arachnec.solver.budget import Clock
from arachnec.solver.exact_packing import shortest_packing
from arachnec.solver.gap_search import shortest_with_its_degrees
from arachnec.solver.problem import Choice, Effort, Job, Problem, Schedule, violations
from arachnec.solver.z3_question import Answer
from arachnec.solver.z3_schedule import find_schedule


@st.composite
def problems(draw: st.DrawFn, most_jobs: int = 5) -> Problem:
    gpus = draw(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8)))
    jobs: list[Job] = []
    for _ in range(draw(st.integers(1, most_jobs))):
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1, max_size=3)))
        ticks = sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=len(degrees))), reverse=True)
        jobs.append(Job(tuple(map(Choice, degrees, ticks))))
    return Problem(tuple(jobs), gpus)


def brute_force(problem: Problem) -> int | None:
    """The least of the largest loads over every option and block of every job."""
    options = options_of(problem)
    if options is None:
        return None
    places = [
        [
            (o.ticks, range(first, first + o.width))
            for o in row
            for first in range(0, problem.gpus - o.width + 1, o.width)
        ]
        for row in options
    ]
    return min(
        max(sum(ticks for ticks, block in taken if gpu in block) for gpu in range(problem.gpus))
        for taken in itertools.product(*places)
    )


@settings(max_examples=150, deadline=None)
@given(problems(most_jobs=4))
def test_no_packing_is_shorter(problem: Problem) -> None:
    shortest, options = brute_force(problem), options_of(problem)
    if shortest is None or options is None:
        return
    packing, certain = shortest_packing(problem.gpus, options, shortest + 7)
    assert certain and packing is not None
    assert max(packing.load) == shortest
    schedule = realize(problem, packing)
    assert violations(problem, schedule) == []
    assert schedule.makespan(problem) == shortest


@settings(max_examples=60, deadline=None)
@given(problems(most_jobs=4))
def test_there_is_none_below_the_shortest(problem: Problem) -> None:
    shortest, options = brute_force(problem), options_of(problem)
    if shortest is not None and options is not None:
        assert shortest_packing(problem.gpus, options, shortest) == (None, True)


def test_many_jobs_and_a_search_that_is_stopped_are_uncertain() -> None:
    many = Problem(tuple(Job((Choice(1, 100 + j), Choice(2, 60 + j))) for j in range(40)), 8)
    few = Problem(many.jobs[:12], 8)
    for problem, stop in ((many, lambda: False), (few, lambda: True)):
        options = options_of(problem)
        assert options is not None
        assert shortest_packing(problem.gpus, options, 10_000, stop) == (None, False)


def test_times_of_any_size_are_packed_or_left_alone() -> None:
    for scale in (1, 10**6, 10**12, 10**17, 10**30):
        problem = Problem(tuple(Job((Choice(1, 9 * scale), Choice(2, 5 * scale))) for _ in range(5)), 4)
        options = options_of(problem)
        assert options is not None
        packing, certain = shortest_packing(problem.gpus, options, 20 * scale)
        assert (packing is not None and max(packing.load) == 14 * scale) if certain else packing is None
        assert certain == (scale < 10**16)


@settings(max_examples=40, deadline=None)
@given(problems(most_jobs=5))
def test_z3_finds_nothing_shorter_than_what_it_made_shortest(problem: Problem) -> None:
    picks = tuple(len(job.choices) - 1 for job in problem.jobs)
    ends = list(itertools.accumulate(job.choices[-1].ticks for job in problem.jobs))
    one_by_one = Schedule(picks, (0, *ends[:-1]))
    found = shortest_with_its_degrees(problem, one_by_one, 0, Clock(time.perf_counter(), 10_000.0), seed=0)
    assert violations(problem, found) == [] and found.picks == picks
    fixed = Problem(tuple(Job(job.choices[-1:]) for job in problem.jobs), problem.gpus)
    below = found.makespan(problem) - 1
    assert find_schedule(fixed, below, seed=0, effort=Effort())[0] is Answer.IMPOSSIBLE
