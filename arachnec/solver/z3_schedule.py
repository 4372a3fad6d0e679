"""Z3 on start times: is there a schedule of these jobs that ends by a given time?

The model is exact for any degrees and any precedence. Per job one choice and one integer start; for every two jobs a
boolean each way, "i ends before j starts"; and at the start of each job the GPUs held by it and by those then running
are at most what there is (as usage rises only at starts, that is enough). Areas are a redundant pseudo-Boolean
constraint, which is what makes refusals fast. Practical up to some twenty jobs; start times are what limits it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import z3

from arachnec.solver.problem import Choice, Effort, Job, Problem, Schedule, unit_for
from arachnec.solver.z3_question import Answer, Question, true

# Z3's solver of difference constraints, x - y <= c, by Floyd and Warshall: what is said of start times is nothing else.
# It refuses case 33 of benchmarks/plan_tables.py in a third of the time that the general one takes.
DIFFERENCES = 3


def find_schedule(problem: Problem, horizon: int, *, seed: int, effort: Effort) -> tuple[Answer, Schedule | None]:
    """A schedule that ends by ``horizon`` ticks, or the certainty that there is none, or neither within the effort."""
    return StartTimes(problem, seed).answer(horizon, effort)


class StartTimes:
    """One solver for questions about one problem, one after the other.

    Asked about the same horizon again, or about a nearer one, it goes on with all that it has learnt.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self.unit = max(1, reduce(math.gcd, (choice.ticks for job in problem.jobs for choice in job.choices), 0))
        self.problem = Problem(tuple(_divided(job, self.unit) for job in problem.jobs), problem.gpus)
        self.seed = seed
        self.horizon: int | None = None
        self.question = Question()
        self.model: _Model | None = None

    def answer(self, horizon: int, effort: Effort) -> tuple[Answer, Schedule | None]:
        """A schedule that ends by ``horizon``, or the certainty that there is none, or neither within the effort."""
        try:
            return self._answered(horizon, effort)
        except z3.Z3Exception:
            self.model = self.horizon = None  # it may hold a horizon for good, or lack a part of one
            raise

    def _answered(self, horizon: int, effort: Effort) -> tuple[Answer, Schedule | None]:
        self.question.allow(effort)
        if self.model is None:
            solver = self.question.begin(effort, self.seed, z3.SimpleSolver)
            solver.set("arith.solver", DIFFERENCES)
            model = _Model(self.problem, self.question, solver)
            if not model.complete:
                return Answer.UNKNOWN, None
            self.model = model
        solver = self.model.solver
        nearer = horizon // self.unit
        if nearer != self.horizon:
            if self.horizon is None or nearer > self.horizon:
                solver.pop(solver.num_scopes())
                solver.push()
            self.horizon = nearer
            self.model.end_by(nearer)
        answer = self.question.check(solver)
        if answer is not Answer.POSSIBLE:
            return answer, None
        schedule = self.model.schedule(solver.model())
        return answer, replace(schedule, starts=tuple(start * self.unit for start in schedule.starts))


def _divided(job: Job, unit: int) -> Job:
    return replace(job, choices=tuple(replace(choice, ticks=choice.ticks // unit) for choice in job.choices))


class _Model:
    """What holds for every horizon; ``end_by`` adds one."""

    def __init__(self, problem: Problem, question: Question, solver: z3.Solver) -> None:
        self.problem = problem
        self.question = question
        self.complete = False  # where making it took longer than there was time
        self.solver = solver
        self.context = solver.ctx
        jobs = range(len(problem.jobs))
        self.start = [z3.Int(f"start_{j}", self.context) for j in jobs]
        self.pick = [
            [z3.Bool(f"pick_{j}_{k}", self.context) for k in range(len(problem.jobs[j].choices))] for j in jobs
        ]
        for j in jobs:
            self._choose(j)
        self.complete = self._capacity()

    def end_by(self, horizon: int) -> None:
        """Jobs end in time for what must follow them, and their areas are no more than there is."""
        for j, job in enumerate(self.problem.jobs):
            latest = horizon - self.problem.tails[j]
            for pick, choice in zip(self.pick[j], job.choices, strict=True):
                if self.problem.heads[j] + choice.ticks > latest:
                    self.solver.add(z3.Not(pick))
                else:
                    self.solver.add(z3.Implies(pick, self.start[j] <= latest - choice.ticks))
        self._areas(horizon)

    def _choose(self, j: int) -> None:
        job, add = self.problem.jobs[j], self.solver.add
        add(z3.PbEq([(pick, 1) for pick in self.pick[j]], 1))
        add(self.start[j] >= self.problem.heads[j])
        for i in job.before:
            for pick, choice in self._choices(i):
                add(z3.Implies(pick, self.start[j] >= self.start[i] + choice.ticks))

    def _choices(self, j: int) -> Sequence[tuple[z3.BoolRef, Choice]]:
        return list(zip(self.pick[j], self.problem.jobs[j].choices, strict=True))

    def _areas(self, horizon: int) -> None:
        areas = [(pick, choice.area) for j in range(len(self.pick)) for pick, choice in self._choices(j)]
        unit = reduce(math.gcd, (area for _, area in areas), 0) or 1
        room = self.problem.gpus * horizon
        # as sums of rounded areas are no more than rounded sums, rounding down excludes nothing
        unit *= unit_for(max(room, *(area for _, area in areas)) // unit)
        room //= unit
        self.solver.add(z3.PbLe([(pick, area // unit) for pick, area in areas], room))

    def _capacity(self) -> bool:
        """Whether there was time for all of it."""
        related = ancestors(self.problem)
        jobs = range(len(self.problem.jobs))
        free = {(i, j) for i in jobs for j in jobs if i != j and i not in related[j] and j not in related[i]}
        end = [z3.Int(f"end_{j}", self.context) for j in jobs]
        self.solver.add(
            [
                z3.Implies(pick, end[j] == self.start[j] + choice.ticks)
                for j in jobs
                for pick, choice in self._choices(j)
            ]
        )
        for j in jobs:
            if self.question.late():
                return False
            constraints: list[z3.BoolRef] = []
            held = [(pick, choice.degree) for pick, choice in self._choices(j)]
            for i in jobs:
                if (i, j) not in free:
                    continue
                apart = z3.Or(self.start[j] >= end[i], self.start[i] > self.start[j])
                for k, (pick, choice) in enumerate(self._choices(i)):
                    both = z3.Bool(f"holds_{i}_{j}_{k}", self.context)
                    constraints.append(z3.Or(both, z3.Not(pick), apart))
                    held.append((both, choice.degree))
            self.solver.add([*constraints, z3.PbLe(held, self.problem.gpus)])
            self.solver.add([clause for i in range(j) if (i, j) in free for clause in self._too_wide(i, j, end)])
        return True

    def _too_wide(self, i: int, j: int, end: Sequence[z3.ArithRef]) -> Iterator[z3.BoolRef]:
        """Two jobs that together hold more GPUs than there are run one after the other.

        That follows from the rest; stated, it makes a refusal of case 33 of benchmarks/plan_tables.py 1.6 times faster.
        """
        for pick, choice in self._choices(i):
            narrow = [other for other, own in self._choices(j) if own.degree + choice.degree <= self.problem.gpus]
            if len(narrow) < len(self.pick[j]):
                yield z3.Or(z3.Not(pick), *narrow, self.start[i] >= end[j], self.start[j] >= end[i])

    def schedule(self, model: z3.ModelRef) -> Schedule:
        picks = tuple(next(k for k, pick in enumerate(row) if true(model, pick)) for row in self.pick)
        starts = tuple(model.eval(start, model_completion=True).as_long() for start in self.start)
        return Schedule(picks, starts)


def ancestors(problem: Problem) -> list[set[int]]:
    """For every job all jobs that must end before it starts."""
    earlier: list[set[int]] = []
    for job in problem.jobs:
        earlier.append(set(job.before).union(*(earlier[i] for i in job.before)))
    return earlier
