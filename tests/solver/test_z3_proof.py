"""Questions to Z3 against all orders of all choices, in one piece or in many, and the proofs that are made of them."""

from __future__ import annotations

import random
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import Clock
from arachnec.solver.improvers import PROVABLE, Prover
from arachnec.solver.list_schedule import list_schedule, list_schedules
from arachnec.solver.portfolio import Incumbent
from arachnec.solver.problem import Choice, Effort, Job, Problem, violations
from arachnec.solver.search import solve
from arachnec.solver.z3_proof import Answer, Proof, Question

ALL = Effort(steps=60_000_000)


def best_of_all(problem: Problem) -> int:
    """The shortest makespan, by all choices and all orders in which jobs are put where they start earliest."""
    picks = list(product(*(range(len(job.choices)) for job in problem.jobs)))
    waits = [(i, j) for j, job in enumerate(problem.jobs) for i in job.before]
    orders = permutations(range(len(problem.jobs)))
    legal = [order for order in orders if all(order.index(i) < order.index(j) for i, j in waits)]
    return min(list_schedule(problem, pick, order).makespan(problem) for pick in picks for order in legal)


@st.composite
def problems(draw: st.DrawFn, most_jobs: int = 4) -> Problem:
    """Jobs of few kinds, so that many are equal; some wait for others."""
    gpus = draw(st.integers(1, 6))
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1, max_size=3)))
        ticks = sorted(draw(st.sets(st.integers(1, 9), min_size=1, max_size=len(degrees))), reverse=True)
        kinds.append(tuple(map(Choice, degrees, ticks)))
    jobs: list[Job] = []
    for index in range(draw(st.integers(1, most_jobs))):
        waits = draw(st.sets(st.integers(0, index - 1), max_size=1)) if index and draw(st.booleans()) else set()
        jobs.append(Job(draw(st.sampled_from(kinds)), tuple(sorted(waits))))
    return Problem(tuple(jobs), gpus)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 10**9))
def test_answers_are_those_of_all_orders_whatever_was_asked_before(problem: Problem, unit: int) -> None:
    optimum = best_of_all(problem)
    scaled = Problem(
        tuple(Job(tuple(Choice(c.degree, unit * c.ticks) for c in job.choices), job.before) for job in problem.jobs),
        problem.gpus,
    )
    question = Question(scaled, 0)
    for horizon in (optimum - 1, optimum + 2, optimum, optimum - 2, optimum):
        answer, schedule = question.answer(unit * horizon, ALL)
        assert answer is (Answer.POSSIBLE if horizon >= optimum else Answer.IMPOSSIBLE)
        if schedule is not None:
            assert violations(scaled, schedule) == []
            assert schedule.makespan(scaled) <= unit * horizon


def drawn(seed: int, jobs: int, *, chained: bool) -> Problem:
    rng = random.Random(seed)
    rows = []
    for index in range(jobs):
        ticks = rng.randint(20, 60)
        choices = tuple(Choice(degree, ticks * (10 + degree) // (11 * degree)) for degree in (1, 2, 4))
        rows.append(Job(choices, (index - 1,) if chained and index % 2 else ()))
    return Problem(tuple(rows), 4)


@pytest.mark.parametrize("chained", [False, True])
def test_questions_in_small_pieces_have_the_answers_of_whole_ones(chained: bool) -> None:
    for seed in range(3):
        problem = drawn(seed, 6, chained=chained)
        optimum = solve(problem, Clock(0.0, 0.0, steps=20_000.0), seed).bound
        whole, pieces = Question(problem, 0), Question(problem, seed)
        for horizon in (optimum - 1, optimum + 9, optimum, optimum - 2, optimum):
            answers = (pieces.answer(horizon, Effort(steps=3000)) for _ in range(1000))
            answer, schedule = next(piece for piece in answers if piece[0] is not Answer.UNKNOWN)
            assert answer is (Answer.POSSIBLE if horizon >= optimum else Answer.IMPOSSIBLE)
            assert answer is whole.answer(horizon, ALL)[0]
            assert schedule is None or violations(problem, schedule) == []


@pytest.mark.parametrize("chained", [False, True])
def test_bound_and_makespan_meet_in_slices(chained: bool) -> None:
    problem = drawn(1, 6, chained=chained)
    bound = lower_bound(problem)
    proof = Proof(problem, next(list_schedules(problem, bound)), bound, seed=0)
    for _ in range(200):
        low, high = proof.low, proof.high
        proof.run(proof.schedule, proof.low, Clock(0.0, 0.0, steps=40))
        assert low <= proof.low <= proof.high <= high
        if proof.low == proof.high:
            break
    assert proof.low == proof.high == solve(problem, Clock(0.0, 0.0, steps=20_000.0), seed=3).bound
    assert violations(problem, proof.schedule) == []


@pytest.mark.parametrize(("jobs", "gpus", "asked"), [(8, 16, True), (16, 16, True), (32, 6, False), (64, 32, False)])
def test_what_is_too_large_to_be_proved_is_not_asked_about(jobs: int, gpus: int, asked: bool) -> None:
    problem = Problem(tuple(Job((Choice(1, 7 + index % 5), Choice(2, 4))) for index in range(jobs)), gpus)
    incumbent = Incumbent(problem, next(list_schedules(problem, 1)), 1)
    assert (gpus * jobs * (jobs - 1) // 2 <= PROVABLE) == asked
    assert (Prover(problem).slice(incumbent) is not None) == asked
