"""Z3 as the prover: is there a schedule that ends by a horizon, or certainly none? The one file that imports it.

The encoding is exact for any degrees and any precedence: per job one choice, a set of as many GPUs, a start and an end.
Jobs with a GPU in common run one after the other. All that is said of starts and ends is a difference, x - y <= c, and
Z3 has a solver for that alone. Orders of pipelines are the case in which every job has its GPU
(``pipelining.order_windows``).

What else is stated follows from that, and makes refusals fast. Choices whose area is more above the job's least than is
free in all are left out. The ticks of the jobs on one GPU sum to at most the horizon, and to at least the horizon less
what is free in all and not spent on larger choices. GPUs are interchangeable, so their columns of the job x GPU matrix
may be taken in lexicographic order, and jobs that are equal and wait for nothing likewise their rows (Flener and
others, CP 2002: both at once, since both are by the same order of the variables).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import reduce
from itertools import pairwise
from typing import TypeAlias

import z3

from arachnec.solver.budget import Clock
from arachnec.solver.decoder import justified
from arachnec.solver.problem import Choice, Effort, Job, Problem, Schedule, violations

# Z3's solvers of difference constraints: one with a table of all pairs, for few jobs, and one with a graph.
DENSE, SPARSE = 3, 1
# That Z3's pseudo-Boolean constraints take.
LARGEST_NUMBER = 2**31 - 1
# Of what is left, that a question from the bound may take.
BELOW = 0.2

Boolean: TypeAlias = z3.BoolRef
Terms: TypeAlias = Sequence[tuple[Boolean, int]]


class Answer(Enum):
    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"


class Model:
    """Jobs with a start and an end in whole numbers; ``steps`` is what Z3 has counted for all that it was asked.

    Asked again, with more or with nothing added, Z3 goes on with all that it has learnt.
    """

    def __init__(self, jobs: int, seed: int, differences: int = SPARSE) -> None:
        self.solver = z3.SimpleSolver(ctx=z3.Context())
        self.solver.set("random_seed", seed % 2**31)
        self.solver.set("arith.solver", differences)
        self.start = [z3.Int(f"start_{j}", self.solver.ctx) for j in range(jobs)]
        self.end = [z3.Int(f"end_{j}", self.solver.ctx) for j in range(jobs)]
        self.steps = 0

    def boolean(self, name: str) -> Boolean:
        return z3.Bool(name, self.solver.ctx)

    def require(self, boolean: Boolean | bool) -> None:
        self.solver.add(boolean)

    def apart(self, i: int, j: int, meet: Boolean | None = None) -> tuple[Boolean, Boolean]:
        """Where they ``meet``, one after the other: whether i is first, and whether j is."""
        first = self.boolean(f"first_{i}_{j}")
        second = z3.Not(first)
        apart = [] if meet is None else [z3.Not(meet)]
        self.solver.add(z3.Or(*apart, second, self.start[j] >= self.end[i]))
        self.solver.add(z3.Or(*apart, first, self.start[i] >= self.end[j]))
        return first, second

    def at_most(self, terms: Terms, most: int) -> None:
        """Numbers too large for Z3 are rounded so that nothing is excluded."""
        unit = _unit(max(most, *(number for _, number in terms)))
        self.solver.add(z3.PbLe([(boolean, number // unit) for boolean, number in terms], most // unit))

    def at_least(self, terms: Terms, least: int) -> None:
        unit = _unit(max(least, *(number for _, number in terms)))
        self.solver.add(z3.PbGe([(boolean, -(-number // unit)) for boolean, number in terms], least // unit))

    def check(self, effort: Effort) -> Answer:
        """Whether all that was said can be true; unknown where the effort ends first."""
        if effort.steps is not None:
            self.solver.set("rlimit", max(1, effort.steps))
        if effort.wall_ms is not None:
            self.solver.set("timeout", max(1, effort.wall_ms))
        before = _counted(self.solver)
        answer = self.solver.check()
        self.steps += max(1, _counted(self.solver) - before)
        if answer == z3.sat:
            return Answer.POSSIBLE
        return Answer.IMPOSSIBLE if answer == z3.unsat else Answer.UNKNOWN

    def starts(self) -> list[int]:
        """Of a check that was possible."""
        model = self.solver.model()
        return [model.eval(start, model_completion=True).as_long() for start in self.start]


class Question(Model):
    """Whether a problem has a schedule that ends by a horizon."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(len(problem.jobs), seed, DENSE)
        self.unit = max(1, reduce(math.gcd, (choice.ticks for job in problem.jobs for choice in job.choices), 0))
        self.problem = Problem(tuple(_divided(job, self.unit) for job in problem.jobs), problem.gpus)
        self.horizon: int | None = None
        jobs, gpus = self.problem.jobs, range(problem.gpus)
        self.pick = [[self.boolean(f"pick_{j}_{k}") for k in range(len(job.choices))] for j, job in enumerate(jobs)]
        self.cell = [[self.boolean(f"cell_{j}_{gpu}") for gpu in gpus] for j in range(len(jobs))]
        self.held: list[list[tuple[Boolean, int]]] = [[] for _ in gpus]  # with ticks
        for j in range(len(jobs)):
            self._times(j)
            self._gpus(j)
        for i, j in self._unrelated():
            self._meet(i, j)
        self._in_order()

    def answer(self, horizon: int, effort: Effort) -> tuple[Answer, Schedule | None]:
        """A schedule that ends by ``horizon`` ticks, or the certainty that there is none, or neither in the effort."""
        horizon //= self.unit
        if horizon != self.horizon:
            if self.horizon is None or horizon > self.horizon:
                self.solver.pop(self.solver.num_scopes())
                self.solver.push()
            self.horizon = horizon
            self._end_by(horizon)
        answer = self.check(effort)
        return answer, self._schedule() if answer is Answer.POSSIBLE else None

    def _schedule(self) -> Schedule:
        model = self.solver.model()
        picks = (next(k for k, pick in enumerate(row) if z3.is_true(model.eval(pick, True))) for row in self.pick)
        return Schedule(tuple(picks), tuple(self.unit * start for start in self.starts()))

    def _end_by(self, horizon: int) -> None:
        """Jobs end in time for what must follow them, and their areas leave the others enough."""
        least = [min(choice.area for choice in job.choices) for job in self.problem.jobs]
        spare = self.problem.gpus * horizon - sum(least)
        spent = []  # by choices that are larger than the least of their job
        for j, (head, tail) in enumerate(zip(self.problem.heads, self.problem.tails, strict=True)):
            self.solver.add(self.end[j] <= horizon - tail)
            for pick, choice in self._choices(j):
                if head + choice.ticks + tail > horizon or choice.area - least[j] > spare:
                    self.solver.add(z3.Not(pick))
                elif choice.area > least[j]:
                    spent.append((pick, choice.area - least[j]))
        if spent:
            self.at_most(spent, spare)
        saved = [(z3.Not(pick), area) for pick, area in spent]
        full = horizon - spare + sum(area for _, area in spent)
        for ticks in self.held:
            self.at_most(ticks, horizon)
            if full > 0:
                self.at_least([*ticks, *saved], full)

    def _choices(self, j: int) -> list[tuple[Boolean, Choice]]:
        return list(zip(self.pick[j], self.problem.jobs[j].choices, strict=True))

    def _times(self, j: int) -> None:
        """One choice, which says how long the job runs, after those that it waits for."""
        self.solver.add(z3.PbEq([(pick, 1) for pick in self.pick[j]], 1))
        self.solver.add(self.start[j] >= self.problem.heads[j])
        for pick, choice in self._choices(j):
            self.solver.add(z3.Implies(pick, self.end[j] == self.start[j] + choice.ticks))
        for i in self.problem.jobs[j].before:
            self.solver.add(self.start[j] >= self.end[i])

    def _gpus(self, j: int) -> None:
        """As many cells of the job's row as its degree."""
        for k, (pick, choice) in enumerate(self._choices(j)):
            held = self.cell[j]
            if len(self.pick[j]) > 1:
                held = [self.boolean(f"held_{j}_{k}_{gpu}") for gpu in range(self.problem.gpus)]
                self.solver.add([here == z3.And(pick, cell) for here, cell in zip(held, self.cell[j], strict=True)])
            self.solver.add(z3.PbEq([*((here, 1) for here in held), (z3.Not(pick), choice.degree)], choice.degree))
            for ticks, here in zip(self.held, held, strict=True):
                ticks.append((here, choice.ticks))

    def _unrelated(self) -> Iterator[tuple[int, int]]:
        """Pairs of jobs of which neither waits for the other."""
        earlier: list[set[int]] = []
        for j, job in enumerate(self.problem.jobs):
            earlier.append(set(job.before).union(*(earlier[i] for i in job.before)))
            yield from ((i, j) for i in range(j) if i not in earlier[j])

    def _meet(self, i: int, j: int) -> None:
        """Two with a GPU in common are apart; two that together hold more GPUs than there are have one."""
        meet = self.boolean(f"meet_{i}_{j}")
        both = zip(self.cell[i], self.cell[j], strict=True)
        self.solver.add([z3.Or(meet, z3.Not(one), z3.Not(other)) for one, other in both])
        self.apart(i, j, meet)
        for pick, choice in self._choices(i):
            narrow = [p for p, own in self._choices(j) if own.degree + choice.degree <= self.problem.gpus]
            if len(narrow) < len(self.pick[j]):
                self.solver.add(z3.Or(z3.Not(pick), meet, *narrow))

    def _in_order(self) -> None:
        """Columns in lexicographic order, and rows of equal jobs."""
        jobs = self.problem.jobs
        alone = [not job.before and not after for job, after in zip(jobs, self.problem.after, strict=True)]
        by_length = sorted(range(len(jobs)), key=lambda j: (-jobs[j].choices[-1].ticks, self._kind(j), alone[j]))
        equal: list[Boolean | None] = [None] * self.problem.gpus
        for j in by_length:
            for gpu, (left, right) in enumerate(pairwise(self.cell[j])):
                equal[gpu] = self._ordered(equal[gpu], left, right)
        for i, j in pairwise(by_length):
            if alone[i] and alone[j] and self._kind(i) == self._kind(j):
                self._rows_in_order(i, j)

    def _kind(self, j: int) -> list[tuple[int, int]]:
        return [(choice.degree, choice.ticks) for choice in self.problem.jobs[j].choices]

    def _rows_in_order(self, i: int, j: int) -> None:
        """The first has the narrower choice, or the same and a row at least the other's."""
        for k, later in enumerate(self.pick[i]):
            self.solver.add([z3.Or(z3.Not(later), z3.Not(narrower)) for narrower in self.pick[j][:k]])
        equal = self.boolean(f"equal_{i}_{j}")
        self.solver.add([z3.Or(equal, z3.Not(a), z3.Not(b)) for a, b in zip(self.pick[i], self.pick[j], strict=True)])
        for left, right in zip(self.cell[i], self.cell[j], strict=True):
            equal = self._ordered(equal, left, right)

    def _ordered(self, equal: Boolean | None, left: Boolean, right: Boolean) -> Boolean:
        """left >= right where all before was equal; what is returned is true if they are equal, too."""
        given = [] if equal is None else [z3.Not(equal)]
        same = z3.FreshBool("same", self.solver.ctx)
        self.solver.add(z3.Or(*given, left, z3.Not(right)))
        self.solver.add(z3.Or(*given, same, left, right), z3.Or(*given, same, z3.Not(left), z3.Not(right)))
        return same


class Proof:
    """The best schedule that is known, and the bound ``low``, below which none ends. It outlasts a call.

    "Is there a schedule that ends by this horizon" is easy to refuse near the bound, where little area is free, easy to
    grant far above the optimum, and hard in between. So every other question is half-way between the bound and the
    least horizon that took too long. The others ask whether there is anything shorter at all: no proof comes without
    the refusal of one, so they have all the time there is.
    """

    def __init__(self, problem: Problem, schedule: Schedule, bound: int, seed: int) -> None:
        self.problem, self.schedule, self.low = problem, schedule, bound
        self.from_bound, self.from_above = Question(problem, seed), Question(problem, seed)
        self.asked = 0

    @property
    def high(self) -> int:
        return self.schedule.makespan(self.problem)

    def run(self, schedule: Schedule, bound: int, clock: Clock) -> None:
        """Until the bound is met or the time is over; schedule and bound are the best known now."""
        self.low = max(self.low, bound)
        self._offer(schedule)
        put_off = self.high  # the least horizon at which a question from the bound took too long
        while self.low < self.high and clock.left() >= 1:
            self.asked += 1
            if self.asked % 2:
                horizon = (self.low + min(put_off, self.high)) // 2
                answer, shorter = self._asked(self.from_bound, horizon, clock, BELOW)
                if answer is Answer.UNKNOWN:
                    put_off = horizon if horizon > self.low else self.high
            else:
                horizon = self.high - 1
                answer, shorter = self._asked(self.from_above, horizon, clock)
            if answer is Answer.IMPOSSIBLE:
                self.low = max(self.low, horizon + 1)
            if shorter is not None:
                self._offer(justified(self.problem, shorter))

    def _offer(self, schedule: Schedule) -> None:
        if schedule.makespan(self.problem) < self.high and not violations(self.problem, schedule):
            self.schedule = schedule

    def _asked(
        self, question: Question, horizon: int, clock: Clock, part: float = 1.0
    ) -> tuple[Answer, Schedule | None]:
        """The answer within a part of what is left."""
        before = question.steps
        answer = question.answer(horizon, clock.effort(part * clock.left()))
        clock.count_z3(question.steps - before)
        return answer


def _divided(job: Job, unit: int) -> Job:
    return replace(job, choices=tuple(replace(choice, ticks=choice.ticks // unit) for choice in job.choices))


def _unit(largest: int) -> int:
    """What numbers up to ``largest`` must be divided by so that Z3 takes them; 1 where it does as they are."""
    return max(1, -(-largest // LARGEST_NUMBER))


def _counted(solver: z3.Solver) -> int:
    counts = solver.statistics()
    return next((int(counts[index][1]) for index in range(len(counts)) if counts[index][0] == "rlimit count"), 0)
