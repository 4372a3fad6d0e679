"""The portfolio: who is called, for how long, and what the incumbent lets pass."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from arachnec.solver.budget import Clock
from arachnec.solver.portfolio import Improvement, Incumbent, Objective, Record, run
from arachnec.solver.problem import Choice, Job, Problem, Schedule, violations
from arachnec.solver.search import solve

ONE = Problem((Job((Choice(1, 1_000_000),)),), 1)


def schedule(start: int) -> Schedule:
    """Of the one job; later is longer."""
    return Schedule((0,), (start,))


@dataclass
class Scripted:
    """Spends the whole slice, and gains ``gain`` ticks with every call."""

    name: str
    smallest: float
    gain: int = 0
    proves: bool = False
    hope: float = 0.05
    slices: list[float] = field(default_factory=list)

    def slice(self, incumbent: Incumbent) -> float | None:
        return self.smallest

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        self.slices.append(clock.left())
        clock.count_ms(clock.left())
        return Improvement((schedule(max(0, incumbent.schedule.starts[0] - self.gain)),))


def called(*improvers: Scripted, steps: float = 1000.0) -> list[Record]:
    incumbent = Incumbent(ONE, schedule(500_000), 1_000_000)
    return run(improvers, incumbent, Clock(0.0, 0.0, steps=steps), random.Random(0))


def test_an_improver_whose_smallest_slice_does_not_fit_is_not_called() -> None:
    large, small = Scripted("large", 2000.0), Scripted("small", 1.0)
    called(large, small)
    assert not large.slices
    assert sum(small.slices) == pytest.approx(1000.0, rel=0.01)


def test_who_gains_gets_most() -> None:
    idle, able = Scripted("idle", 5.0), Scripted("able", 5.0, gain=100)
    called(idle, able)
    assert sum(able.slices) > sum(idle.slices)


def test_nobody_is_called_once_the_gap_is_closed() -> None:
    able = Scripted("able", 5.0, gain=500_000)
    called(able)
    assert len(able.slices) == 1


def test_the_dear_objective_is_asked_only_where_the_cheap_one_is_promising() -> None:
    asked: list[Schedule] = []

    def placed(one: Schedule) -> float:
        asked.append(one)
        return one.makespan(ONE) / 1000 + 5.0

    incumbent = Incumbent(ONE, schedule(9000), 1_000_000, [Objective("placed", placed, 1.0)])
    clock = Clock(0.0, 0.0, steps=10)
    assert incumbent.offer(schedule(9000), clock)
    assert not incumbent.offer(schedule(20_000), clock)
    assert incumbent.offer(schedule(1000), clock)
    assert asked == [schedule(9000), schedule(1000)]
    assert (incumbent.schedule, incumbent.length) == (schedule(1000), 1006.0)
    assert not incumbent.offer(schedule(0), Clock(0.0, 0.0, steps=0.5)), "no time to confirm it"
    assert incumbent.shortest == schedule(0)


@pytest.mark.parametrize("without", ["", "annealing", "large neighbourhoods", "z3 gap search"])
def test_any_portfolio_gives_a_valid_schedule_that_is_proved_only_where_it_meets_the_bound(without: str) -> None:
    rng = random.Random(1)
    for chained in (False, True):
        jobs: list[Job] = []
        for index in range(10):
            ticks = rng.randint(100, 3000)
            choices = tuple(Choice(degree, ticks * (10 + degree) // (11 * degree)) for degree in (1, 2, 4))
            jobs.append(Job(choices, (index - 1,) if chained and index % 2 else ()))
        problem = Problem(tuple(jobs), 6)
        first = solve(problem, Clock(0.0, 0.0, steps=0), seed=0, without=(without,))
        answer = solve(problem, Clock(0.0, 0.0, steps=60), seed=0, without=(without,))
        makespan = answer.schedule.makespan(problem)
        assert violations(problem, answer.schedule) == []
        assert answer.area_bound <= answer.bound <= makespan <= first.schedule.makespan(problem)
        assert answer.proved == (answer.bound == makespan)
        assert answer == solve(problem, Clock(0.0, 0.0, steps=60), seed=0, without=(without,))
