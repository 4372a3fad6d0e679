"""Bound and makespan of a small problem moved towards each other by questions to Z3, until they meet.

"Is there a schedule that ends by this horizon" is easy to refuse near the bound, where little area is free and most
degrees are out of the question, easy to grant far above the optimum, and hard in between. So horizons are asked from
the bound upwards, in leaps of a part of what is left, and a question that takes long is put off: the next ones lie
below it, and it comes up again, with more time, when those are answered. Two questions run at once (Z3 works
outside of Python's lock); an answer stops the other question where it has become pointless.

Where the makespan is close to the bound, or the shortest packing, one of the two asks from above: is there anything
shorter at all. A refusal ends the search. What is found is made as short as its degrees allow before it counts: with
the degrees given, a question takes Z3 a twentieth of a second.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import Effort, Problem, Schedule, Solution, violations
from arachnec.solver.z3_assignment import Conflict, Question, schedule_by_sets
from arachnec.solver.z3_schedule import Answer

CORES = 2
LEAPS = (0.5, 0.25)  # of what lies between bound and makespan: where the first and the second question is asked
FIRST_MS = 300.0  # of a question before it is put off
CLOSE = 0.0015  # of the makespan: where the two are that near, one question comes from above
NEAR = 0.25  # of what lies between them: a question put off is asked again where the bound has come that near to it
LONGER = 3  # times as long as before
FIRST_FROM_ABOVE_MS = 2500.0  # of a question from above


def squeeze(
    problem: Problem, incumbent: Solution, *, milliseconds: float, seed: int, from_above: bool = False
) -> Solution:
    """The best schedule and bound after so much wall time, sooner where they meet.

    ``from_above`` asks from above at once: where it is not likely that there is anything shorter.
    """
    state = _Squeeze(problem, incumbent, time.perf_counter() + milliseconds / 1e3, seed, from_above)
    with ThreadPoolExecutor(CORES) as pool:
        for done in [pool.submit(state.work) for _ in range(CORES)]:
            done.result()
    return state.solution()


def squeeze_in_steps(problem: Problem, incumbent: Solution, *, steps: int, seed: int) -> Solution:
    """The same without a clock: one question after the other, each with as many of Z3's steps, none asked again."""
    state = _Squeeze(problem, incumbent, None, seed)
    while (asked := state.next()) is not None and state.limit <= FIRST_MS:
        effort = Effort(steps, None)
        answer, found = schedule_by_sets(problem, asked.horizon, seed=seed, effort=effort, conflicts=state.conflicts)
        if found is not None and not violations(problem, found):
            found = shortest_with_its_degrees(problem, found, state.low, seed=seed, effort=effort)
        state.learn(asked, answer, found)
    return state.solution()


def shortest_with_its_degrees(problem: Problem, schedule: Schedule, low: int, *, seed: int, effort: Effort) -> Schedule:
    """The schedule, or a shorter one in which every job has the same choice; none ends before ``low`` ticks.

    ``effort`` is that of all questions in wall time, of one in steps.
    """
    until = None if effort.wall_ms is None else time.perf_counter() + effort.wall_ms / 1e3
    jobs = (replace(job, choices=(job.choices[pick],)) for job, pick in zip(problem.jobs, schedule.picks, strict=True))
    fixed = Problem(tuple(jobs), problem.gpus)
    low, high = max(low, lower_bound(fixed)), schedule.makespan(problem)
    horizon = high - 1
    while low < high:
        wall = None if until is None else int((until - time.perf_counter()) * 1e3)
        if wall is not None and wall < 1:
            break
        answer, found = schedule_by_sets(fixed, horizon, seed=seed, effort=Effort(effort.steps, wall))
        if answer is Answer.IMPOSSIBLE:
            low = horizon + 1
        elif found is not None and not violations(fixed, found):
            schedule, high = replace(schedule, starts=found.starts), found.makespan(fixed)
        else:
            break
        horizon = (low + high - 1) // 2
    return schedule


@dataclass(frozen=True)
class _Asked:
    """Whether there is a schedule that ends by ``horizon``."""

    horizon: int
    from_above: bool = False


class _Squeeze:
    """What is known; shared by the threads, and changed under ``lock`` alone."""

    def __init__(
        self, problem: Problem, incumbent: Solution, until: float | None, seed: int, from_above: bool = False
    ) -> None:
        self.problem, self.incumbent, self.until, self.seed = problem, incumbent, until, seed
        self.from_above = from_above
        self.low, self.schedule = incumbent.bound, incumbent.schedule
        self.high = self.schedule.makespan(problem)
        self.put_off = self.high  # the least horizon at which a question took too long
        self.limit = FIRST_MS
        self.limit_from_above = FIRST_FROM_ABOVE_MS
        self.hopeless = False  # to ask from above
        self.conflicts: list[Conflict] = []
        self.lock = threading.Lock()
        self.asked: dict[Question, _Asked] = {}

    def solution(self) -> Solution:
        return Solution(self.schedule, self.incumbent.area_bound, self.low, self.low >= self.high)

    def work(self) -> None:
        """Asks until the bound is met or the time is over."""
        assert self.until is not None
        number = 0
        while True:
            with self.lock:
                asked = self.next()
                left = (self.until - time.perf_counter()) * 1e3
                if asked is None or left < 1:
                    return
                question = Question()
                self.asked[question] = asked
                effort = Effort(None, int(min(left, self.limit_from_above if asked.from_above else self.limit)))
                number += 1
            try:
                answer, found = schedule_by_sets(
                    self.problem,
                    asked.horizon,
                    seed=self.seed + number,
                    effort=effort,
                    question=question,
                    conflicts=self.conflicts,
                )
                if found is not None and not violations(self.problem, found):
                    effort = Effort(None, int((self.until - time.perf_counter()) * 1e3))
                    found = shortest_with_its_degrees(self.problem, found, self.low, seed=self.seed, effort=effort)
            finally:
                with self.lock:
                    del self.asked[question]
            with self.lock:
                if not question.stopped or answer is not Answer.UNKNOWN:
                    self.learn(asked, answer, found)
                for other, at in self.asked.items():
                    if not self.low <= at.horizon < self.high:
                        other.stop()

    def next(self) -> _Asked | None:
        """Where to ask next; None where bound and makespan have met."""
        if self.low >= self.high:
            return None
        if self.put_off < self.high and self.put_off - self.low <= NEAR * (self.high - self.low):
            self.put_off, self.limit = self.high, LONGER * self.limit
        room, running = self.put_off - self.low, {each.horizon for each in self.asked.values()}
        from_above = not self.hopeless and (self.from_above or self.high - self.low <= CLOSE * self.high)
        if from_above and not any(each.from_above for each in self.asked.values()) and self.high - 1 not in running:
            return _Asked(self.high - 1, from_above=True)
        wished = [self.low + int(room * leap) for leap in LEAPS]
        return _Asked(next((horizon for horizon in wished if horizon not in running), wished[0]))

    def learn(self, asked: _Asked, answer: Answer, found: Schedule | None) -> None:
        if answer is Answer.IMPOSSIBLE:
            self.low = max(self.low, asked.horizon + 1)
        elif found is not None and not violations(self.problem, found):
            reached = found.makespan(self.problem)
            if reached < self.high:
                self.schedule, self.high = found, reached
                self.put_off = min(self.put_off, reached)
        elif asked.from_above:
            self.limit_from_above *= LONGER
            self.hopeless = self.until is None  # asked again with as many steps, it would have no answer again
        else:
            self.put_off = min(self.put_off, asked.horizon)
            if self.put_off <= self.low:
                self.put_off, self.limit = self.high, LONGER * self.limit
