"""What waiting adds to the lower bound, against every schedule of small problems."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.bound import lower_bound
from arachnec.solver.chain_bound import chain_bound
from arachnec.solver.list_schedule import list_schedule
from arachnec.solver.problem import Choice, Job, Problem
from arachnec.solver.static_layouts import chain_of


@st.composite
def trees(draw: st.DrawFn, most_jobs: int = 5) -> Problem:
    """Jobs each of which is waited for by one other at most."""
    gpus = draw(st.integers(1, 6))
    jobs: list[Job] = []
    free: list[int] = []
    for index in range(draw(st.integers(1, most_jobs))):
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1, max_size=3)))
        ticks = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=len(degrees))), reverse=True)
        before = tuple(sorted(draw(st.sets(st.sampled_from(free), max_size=2)))) if free else ()
        free = [j for j in free if j not in before] + [index]
        jobs.append(Job(tuple(map(Choice, degrees, ticks)), before))
    return Problem(tuple(jobs), gpus)


def shortest(problem: Problem) -> int:
    """Over all choices and all orders, each job where it can start first: one of these is optimal."""
    many = range(len(problem.jobs))
    orders = [
        order
        for order in itertools.permutations(many)
        if all(order.index(i) < order.index(j) for j in many for i in problem.jobs[j].before)
    ]
    picks = itertools.product(*(range(len(job.choices)) for job in problem.jobs))
    return min(list_schedule(problem, pick, order).makespan(problem) for pick in picks for order in orders)


@settings(max_examples=150, deadline=None)
@given(trees())
def test_no_schedule_of_chains_is_shorter_than_the_bound(problem: Problem) -> None:
    assert lower_bound(problem) <= shortest(problem)


@given(trees(most_jobs=12), st.integers(0, 60))
def test_the_bound_is_not_below_what_is_known(problem: Problem, low: int) -> None:
    assert chain_bound(problem, low) >= low


def test_the_jobs_of_a_chain_share_the_time() -> None:
    """By 15 ticks either job of a chain can be narrow, but not both; by 20 they can."""
    job = (Choice(1, 10), Choice(4, 5))
    problem = Problem(tuple(Job(job, (j - 1,) if j % 2 else ()) for j in range(6)), 4)
    assert chain_bound(problem, 15) == 20 == lower_bound(problem)


def test_what_few_gpus_can_share_leaves_the_others_idle() -> None:
    """Two encoders of one GPU for 10 ticks; until then 6 of 8 GPUs are idle."""
    pair = (Job((Choice(1, 10),)), Job((Choice(1, 80), Choice(8, 10)), (0,)))
    problem = Problem((*pair, Job(pair[0].choices), Job(pair[1].choices, (2,))), 8)
    assert lower_bound(problem) == 30 == shortest(problem)


def test_a_chain_may_have_thousands_of_jobs() -> None:
    """Walked without recursion, and each job looked at once."""
    count = 3000
    problem = Problem(tuple(Job((Choice(1, 1),), (j - 1,) if j else ()) for j in range(count)), 2)
    assert chain_bound(problem, count) == count
    assert chain_of(problem, count - 1) == list(range(count))


@given(trees(most_jobs=12))
def test_what_a_job_waits_for_stands_before_it(problem: Problem) -> None:
    chain = chain_of(problem, len(problem.jobs) - 1)
    assert chain[-1] == len(problem.jobs) - 1
    assert all(chain.index(i) < chain.index(j) for j in chain for i in problem.jobs[j].before)
