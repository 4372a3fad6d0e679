"""Questions to Z3 that go on where they were cut off, and the search that asks them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import z3

from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import OPERATIONS_PER_MS, Clock
from arachnec.solver.gap_search import GapSearch, shortest_with_its_degrees
from arachnec.solver.list_schedule import list_schedules
from arachnec.solver.problem import Choice, Effort, Job, Problem, Schedule, violations
from arachnec.solver.z3_question import Answer, Question
from arachnec.solver.z3_schedule import StartTimes, find_schedule

ALL = Effort(steps=60_000 * OPERATIONS_PER_MS)


def drawn(seed: int, jobs: int, *, chained: bool) -> Problem:
    rng = random.Random(seed)
    rows = []
    for index in range(jobs):
        ticks = rng.randint(20, 60)
        choices = tuple(Choice(degree, ticks * (10 + degree) // (11 * degree)) for degree in (1, 2, 4))
        rows.append(Job(choices, (index - 1,) if chained and index % 2 else ()))
    return Problem(tuple(rows), 4)


def shortest(problem: Problem) -> int:
    horizon = lower_bound(problem)
    while find_schedule(problem, horizon, seed=0, effort=ALL)[0] is Answer.IMPOSSIBLE:
        horizon += 1
    return horizon


@pytest.mark.parametrize("chained", [False, True])
def test_questions_in_small_pieces_have_the_answers_of_whole_ones(chained: bool) -> None:
    for seed in range(3):
        problem = drawn(seed, 6, chained=chained)
        optimum = shortest(problem)
        inquiry = StartTimes(problem, seed)
        for horizon in (optimum - 1, optimum + 9, optimum, optimum - 2, optimum):
            pieces = (inquiry.answer(horizon, Effort(steps=5000)) for _ in range(1000))
            answer, schedule = next(piece for piece in pieces if piece[0] is not Answer.UNKNOWN)
            assert answer is (Answer.POSSIBLE if horizon >= optimum else Answer.IMPOSSIBLE)
            assert schedule is None or violations(problem, schedule) == []
            assert schedule is None or schedule.makespan(problem) <= horizon


def test_a_question_that_was_cut_off_does_not_begin_anew() -> None:
    problem = drawn(4, 8, chained=True)
    horizon = shortest(problem) - 1
    whole = StartTimes(problem, 0)
    assert whole.answer(horizon, ALL)[0] is Answer.IMPOSSIBLE
    pieces, piece = StartTimes(problem, 0), Effort(steps=whole.question.steps // 4)
    number = next(n for n in range(1, 40) if pieces.answer(horizon, piece)[0] is Answer.IMPOSSIBLE)
    assert number > 1
    assert pieces.question.steps < 4 * whole.question.steps


@pytest.mark.parametrize("chained", [False, True])
def test_bound_and_makespan_meet_in_slices(chained: bool) -> None:
    problem = drawn(1, 6, chained=chained)
    bound = lower_bound(problem)
    search = GapSearch(problem, next(list_schedules(problem, bound)), bound)
    for number in range(200):
        search.run(search.schedule, search.low, Clock(0.0, 0.0, steps=40), seed=number)
        if search.low >= search.high:
            break
    assert search.low == search.high == search.schedule.makespan(problem) == shortest(problem)
    assert violations(problem, search.schedule) == []


def test_a_schedule_with_precedence_is_made_as_short_as_its_degrees_allow() -> None:
    problem = Problem((Job((Choice(1, 5),)), Job((Choice(1, 7),), (0,)), Job((Choice(2, 3),))), 2)
    late = Schedule((0, 0, 0), (2, 9, 20))
    short = shortest_with_its_degrees(problem, late, 0, Clock(0.0, 0.0, steps=1000), seed=0)
    assert short.makespan(problem) == 15
    assert violations(problem, short) == []


def test_a_core_is_refused_alone_and_its_search_ends_with_the_effort() -> None:
    """Five jobs of 3 ticks, one after the other, do not end by 14. A sixth is in nobody's way."""
    spent = []
    for effort in (ALL, Effort(steps=1)):
        question = Question()
        solver = question.begin(ALL, 0)
        start = [z3.Int(f"start_{job}", solver.ctx) for job in range(6)]
        solver.add([z3.And(moment >= 0, moment <= 11) for moment in start])
        meets = {pair: z3.Bool(f"meet_{pair}", solver.ctx) for pair in combinations(range(6), 2)}
        for (a, b), meet in meets.items():
            apart = 3 if b < 5 else -11
            solver.add(z3.Or(z3.Not(meet), start[a] + apart <= start[b], start[b] + apart <= start[a]))
        assert question.check(solver, *meets.values()) is Answer.IMPOSSIBLE
        question.allow(effort)
        before = question.steps
        core = question.core(solver, question.steps)
        spent.append(question.steps - before)
        needed = {str(meet) for (_, b), meet in meets.items() if b < 5}
        assert {str(one) for one in core} >= needed
        assert effort != ALL or len(core) == len(needed)
    assert spent[1] < spent[0] / 10
