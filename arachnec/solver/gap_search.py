"""Bound and makespan of a small problem moved towards each other by questions to Z3, until they meet.

"Is there a schedule that ends by this horizon" is easy to refuse near the bound, where little area is free and most
degrees are out of the question, easy to grant far above the optimum, and hard in between. So horizons are asked from
the bound upwards, and a question that takes long is put off: the next ones lie below it, and it comes up again, with
twice the time, when those are answered. Other questions come from above: is there anything shorter at all. No proof
comes without the refusal of one, and one about sets that is cut off begins anew. So it has all the time there is.

With two cores one question of each kind runs (Z3 works outside of Python's lock), and an answer stops the other where
it has become pointless. With one core they take turns: first one from the bound, with a fifth of what is left.

What is known outlasts a call, so that a search can go on where it ended. So do questions about start times: one that
was cut off goes on where Z3 was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import Clock, question_ms, usable_cores
from arachnec.solver.problem import Problem, Schedule, violations
from arachnec.solver.z3_assignment import Assignment, Conflict
from arachnec.solver.z3_question import Answer
from arachnec.solver.z3_schedule import StartTimes

# Of what is left with one core, that a question from the bound may take.
BELOW = 0.2

Inquiry = Assignment | StartTimes


def _chained(problem: Problem) -> bool:
    return any(job.before for job in problem.jobs)


def by_sets(problem: Problem) -> bool:
    """Whether questions are about sets of GPUs: nothing waits, and sets have fewer variables than start times."""
    return not _chained(problem) and problem.gpus <= len(problem.jobs)


def variables(problem: Problem) -> int:
    """How many booleans a question about the whole problem has."""
    across = problem.gpus if by_sets(problem) else len(problem.jobs)
    return across * sum(len(job.choices) for job in problem.jobs)


def bisect(low: int, high: int, ask: Callable[[int], tuple[Answer, int]]) -> int:
    """The least horizon for which the answer was yes, from ``high``, for which it is; none is below ``low``.

    First comes the question whether anything is shorter at all. ``ask`` also says what was reached. No answer ends it.
    """
    horizon = high - 1
    while low < high:
        answer, reached = ask(horizon)
        if answer is Answer.POSSIBLE:
            high = reached
        elif answer is Answer.IMPOSSIBLE:
            low = horizon + 1
        else:
            break
        horizon = (low + high - 1) // 2
    return high


def shortest_with_its_degrees(problem: Problem, schedule: Schedule, low: int, clock: Clock, *, seed: int) -> Schedule:
    """The schedule, or a shorter one in which every job has the same choice; none ends before ``low`` ticks.

    Without it schedules that differ by the rounding of a few ticks would come one after another.
    """
    jobs = (replace(job, choices=(job.choices[pick],)) for job, pick in zip(problem.jobs, schedule.picks, strict=True))
    fixed = Problem(tuple(jobs), problem.gpus)
    best, chained = schedule, _chained(problem)

    def ask(horizon: int) -> tuple[Answer, int]:
        nonlocal best
        if not clock.any_left():
            return Answer.UNKNOWN, 0
        inquiry = StartTimes(fixed, seed) if chained else Assignment(fixed, seed, [])
        answer, shorter = inquiry.answer(horizon, clock.effort())
        clock.count_z3(inquiry.question.steps)
        if shorter is not None and not violations(fixed, shorter):
            best = replace(schedule, starts=shorter.starts)
            return answer, shorter.makespan(fixed)
        return (Answer.UNKNOWN if shorter is not None else answer), 0

    bisect(max(low, lower_bound(fixed)), schedule.makespan(problem), ask)
    return best


@dataclass(frozen=True)
class Asked:
    """Whether there is a schedule that ends by ``horizon``."""

    horizon: int
    from_above: bool = False


class GapSearch:
    """What is known of a problem; shared by the threads, and changed under ``lock`` alone."""

    def __init__(self, problem: Problem, schedule: Schedule, bound: int) -> None:
        self.problem, self.schedule, self.low = problem, schedule, bound
        self.high = schedule.makespan(problem)
        self.by_sets = by_sets(problem)
        self.conflicts: list[Conflict] = []
        self.put_off = self.high  # the least horizon at which a question took too long
        self.limit = question_ms(variables(problem))
        self.number, self.alone = 0, False
        self.lock = threading.Lock()
        self.idle: dict[bool, StartTimes] = {}  # one for questions from above, one for the others
        self.asked: dict[Inquiry, Asked] = {}

    def run(self, schedule: Schedule, bound: int, clock: Clock, seed: int) -> None:
        """Until the bound is met or the time is over; schedule and bound are the best known now."""
        self.low = max(self.low, bound)
        if schedule.makespan(self.problem) < self.high:
            self._shorter(schedule)
        self.alone = clock.steps is not None or usable_cores() == 1
        if self.alone:
            self.work(clock, seed)
            return
        with ThreadPoolExecutor(2) as pool:
            for thread in [pool.submit(self.work, clock, seed) for _ in range(2)]:
                thread.result()

    def work(self, clock: Clock, seed: int) -> None:
        while clock.left() >= 1:
            with self.lock:
                asked = self.next()
                if asked is None:
                    return
                self.number += 1
                inquiry = self._inquiry(asked.from_above, seed + self.number)
                self.asked[inquiry] = asked
                effort = clock.effort(None if asked.from_above else self._limit(clock))
            question, schedule = inquiry.question, None
            before = question.steps
            try:
                answer, schedule = question.answered(partial(inquiry.answer, asked.horizon, effort))
                if schedule is not None:
                    schedule = shortest_with_its_degrees(self.problem, schedule, self.low, clock, seed=seed)
            finally:
                with self.lock:
                    del self.asked[inquiry]
            with self.lock:
                clock.count_z3(question.steps - before)
                if not question.stopped or answer is not Answer.UNKNOWN:
                    self.learn(asked, answer, schedule)
                for other, at in self.asked.items():
                    if not self.low <= at.horizon < self.high:
                        other.question.stop()
                if isinstance(inquiry, StartTimes):
                    self.idle[asked.from_above] = inquiry

    def _limit(self, clock: Clock) -> float:
        """ms of a question that is not from above; with one core the next one has four times that or more."""
        return min(self.limit, BELOW * clock.left()) if self.alone else self.limit

    def _inquiry(self, above: bool, seed: int) -> Inquiry:
        if self.by_sets:
            return Assignment(self.problem, seed, self.conflicts)
        return self.idle.pop(above, None) or StartTimes(self.problem, seed)

    def next(self) -> Asked | None:
        """Where to ask next; None where bound and makespan have met."""
        if self.low >= self.high:
            return None
        if 2 * (self.put_off - self.low) <= (self.high - self.low) // 2:  # in the lower half of the lower half
            self.put_off, self.limit = self.high, 2 * self.limit
        running = {asked.horizon for asked in self.asked.values()}
        if self._from_above() and self.high - 1 not in running:
            return Asked(self.high - 1, from_above=True)
        room = self.put_off - self.low
        horizon = self.low + room // 2
        return Asked(horizon if horizon not in running else self.low + room // 2 // 2)

    def _from_above(self) -> bool:
        """Every other question of one thread, one of the two at once."""
        return self.number % 2 == 1 if self.alone else not any(asked.from_above for asked in self.asked.values())

    def learn(self, asked: Asked, answer: Answer, schedule: Schedule | None) -> None:
        if answer is Answer.IMPOSSIBLE:
            self.low = max(self.low, asked.horizon + 1)
        elif schedule is not None and not violations(self.problem, schedule):
            if schedule.makespan(self.problem) < self.high:
                self._shorter(schedule)
        elif not asked.from_above:
            self.put_off = min(self.put_off, asked.horizon)
            if self.put_off <= self.low:
                self.put_off, self.limit = self.high, 2 * self.limit

    def _shorter(self, schedule: Schedule) -> None:
        self.schedule, self.high = schedule, schedule.makespan(self.problem)
        self.put_off = min(self.put_off, self.high)
