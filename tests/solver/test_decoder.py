"""Decoding: valid, no longer than what the order was taken from, and the same from any position on."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.solver.decoder import Decoder, justified, reversed_problem, reversed_schedule, start_order
from arachnec.solver.list_schedule import list_schedule, nearest_order
from arachnec.solver.problem import Choice, Job, Problem, Schedule, violations


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Problem, Schedule]:
    """A problem of up to 20 jobs, and a list schedule of random degrees in a random order."""
    gpus = draw(st.integers(1, 12))
    jobs: list[Job] = []
    for index in range(draw(st.integers(1, 20))):
        degrees = sorted(draw(st.sets(st.integers(1, gpus), min_size=1, max_size=3)))
        ticks = sorted(draw(st.sets(st.integers(1, 30), min_size=1, max_size=len(degrees))), reverse=True)
        before = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        jobs.append(Job(tuple(map(Choice, degrees, ticks)), tuple(sorted(before))))
    problem = Problem(tuple(jobs), gpus)
    picks = [draw(st.integers(0, len(job.choices) - 1)) for job in jobs]
    order = nearest_order(problem, draw(st.permutations(range(len(jobs)))))
    return problem, list_schedule(problem, picks, order)


@settings(max_examples=150, deadline=None)
@given(scheduled())
def test_no_job_starts_later_than_in_the_schedule_its_order_is_taken_from(given: tuple[Problem, Schedule]) -> None:
    problem, schedule = given
    decoded = Decoder(problem, schedule.picks, start_order(schedule)).schedule()
    assert violations(problem, decoded) == []
    assert all(new <= old for new, old in zip(decoded.starts, schedule.starts, strict=True))


@settings(max_examples=150, deadline=None)
@given(scheduled(), st.data())
def test_decoding_from_a_change_on_is_decoding_anew_unless_too_much_lies_above_the_horizon(
    given: tuple[Problem, Schedule], data: st.DataObject
) -> None:
    problem, schedule = given
    decoder = Decoder(problem, schedule.picks, start_order(schedule))
    decoder.aim(data.draw(st.integers(0, schedule.makespan(problem))))
    job = data.draw(st.integers(0, len(problem.jobs) - 1))
    decoder.set_pick(job, data.draw(st.integers(0, len(problem.jobs[job].choices) - 1)))
    first = decoder.position[job]
    if data.draw(st.booleans()):
        to = data.draw(st.integers(*decoder.span(job)))
        decoder.move(job, to)
        first = min(first, to)
    anew = Decoder(problem, decoder.picks, decoder.order)
    anew.aim(decoder.horizon)
    decoded = decoder.decode(first, math.inf)
    assert decoded is not None and (decoded.above, decoded.last, decoded.ends) == (
        anew.now.above,
        anew.now.last,
        anew.now.ends,
    )
    runs = zip(decoded.ends, decoder.ticks, decoder.degrees, strict=True)
    assert decoded.above == sum(d * max(0, end - max(end - t, decoder.horizon)) for end, t, d in runs)
    for limit in range(max(0, decoded.above - 1), decoded.above + 2):
        assert (decoder.decode(first, limit) is None) == (decoded.above > limit)


@settings(max_examples=150, deadline=None)
@given(scheduled())
def test_a_schedule_reversed_is_one_of_the_reversed_problem_and_comes_back(given: tuple[Problem, Schedule]) -> None:
    problem, schedule = given
    reversed_one, backwards = reversed_problem(problem), reversed_schedule(problem, schedule)
    assert violations(reversed_one, backwards) == []
    assert backwards.makespan(reversed_one) == schedule.makespan(problem)
    assert reversed_problem(reversed_one) == problem
    assert reversed_schedule(reversed_one, backwards) == schedule


@settings(max_examples=100, deadline=None)
@given(scheduled())
def test_a_justified_schedule_is_valid_and_no_longer(given: tuple[Problem, Schedule]) -> None:
    problem, schedule = given
    shorter = justified(problem, schedule)
    assert violations(problem, shorter) == []
    assert shorter.makespan(problem) <= schedule.makespan(problem)


def test_justifying_closes_gaps() -> None:
    """Two narrow jobs are one after the other, where they could run beside each other."""
    narrow, wide = Job((Choice(1, 4),)), Job((Choice(2, 2),))
    problem = Problem((narrow, narrow, wide), 2)
    assert justified(problem, Schedule((0, 0, 0), (0, 4, 8))).makespan(problem) == 6
