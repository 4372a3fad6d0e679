"""The improvers of ``portfolio``: how each works is in a file of its own, here is when it can and what it leaves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arachnec.solver.annealing import COOLER, HOT, KINDS, TRIES, anneal
from arachnec.solver.block_packing import Options, Packing, realize
from arachnec.solver.budget import LISTED, OPERATIONS_PER_MS, Clock
from arachnec.solver.decoder import reversed_problem, reversed_schedule
from arachnec.solver.large_neighbourhood import LEAST_MS, LargeNeighbourhood
from arachnec.solver.portfolio import HOPE, TRUST, Improvement, Improver, Incumbent
from arachnec.solver.problem import Problem, Schedule

if TYPE_CHECKING:
    from arachnec.solver.z3_proof import Proof

# Pairs of jobs times GPUs, up to which Z3 is asked. Of 300 tables of benchmarks/plan_tables.py the largest that it
# proves in 500 steps has 1836, 18 jobs on 12 GPUs. A question about 16 on 24, 2880, has no answer after ten seconds.
PROVABLE = 2000
# Of the same, that Z3 takes in within a ms.
CLAUSES_PER_MS = 40


@dataclass
class Annealing:
    """One cooling after the other, each from the shortest schedule, every second on the time-reversed problem.

    A run that gains nothing is followed by one four times as long and as hot, if that fits; a slice that ends sooner
    cools sooner.
    """

    problem: Problem
    name: str = "annealing"
    hope: float = HOPE
    proves: bool = False
    turn: int = 0
    warmth: int = 0  # of the longest runs so far
    backwards: Problem = field(init=False)

    def __post_init__(self) -> None:
        self.backwards = reversed_problem(self.problem)

    def slice(self, incumbent: Incumbent) -> float | None:
        """What would be the next two kinds shorter, and no less than large neighbourhoods."""
        return max(self._run_ms(-2), LEAST_MS) if self.problem.jobs else None

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        best = incumbent.shortest
        while clock.any_left() and best.makespan(self.problem) > incumbent.bound:
            warmth = max((w for w in range(self.warmth + 1) if self._run_ms(w) <= clock.left()), default=0)
            before, best = best, self._cooled(best, incumbent.bound, warmth, clock, rng)
            if best.makespan(self.problem) >= before.makespan(self.problem) and warmth == self.warmth:
                self.warmth = min(KINDS - 1, warmth + 1)
            self.turn += 1
        return Improvement((best,))

    def _tries(self, warmth: int) -> int:
        return int(TRIES * len(self.problem.jobs) / COOLER ** (KINDS - 1 - warmth))

    def _run_ms(self, warmth: int) -> float:
        """A try decodes half of the jobs."""
        return self._tries(warmth) * decoding_ms(self.problem, 0.5)

    def _cooled(self, start: Schedule, bound: int, warmth: int, clock: Clock, rng: random.Random) -> Schedule:
        most = max(1, self._tries(warmth))
        begin, whole, counted = clock.spent(), max(clock.left(), 1e-6), 0

        def used(tries: int) -> float:
            nonlocal counted
            clock.count_ms((tries - counted) * decoding_ms(self.problem, 0.5))
            counted = tries
            return max(tries / most, (clock.spent() - begin) / whole)

        hot = HOT / COOLER ** (KINDS - 1 - warmth)
        if self.turn % 2 == 0:
            return anneal(self.problem, start, rng, used, bound=bound, hot=hot)
        mirrored = reversed_schedule(self.problem, start)
        shorter = anneal(self.backwards, mirrored, rng, used, bound=bound, hot=hot)
        return reversed_schedule(self.backwards, shorter)


@dataclass
class LargeNeighbourhoods:
    """Blocks of a packing, packed anew by best fit."""

    problem: Problem
    options: Options
    packing: Packing
    name: str = "large neighbourhoods"
    hope: float = TRUST
    proves: bool = False
    search: LargeNeighbourhood | None = None

    def slice(self, incumbent: Incumbent) -> float | None:
        if self.search is not None and self.search.reached <= incumbent.bound:
            return None
        return LEAST_MS

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        problem = self.problem
        if self.search is None:
            own = random.Random(rng.random())
            self.search = LargeNeighbourhood(problem, self.options, self.packing, incumbent.bound, rng=own)
        chained = any(job.before for job in problem.jobs)
        best = None
        while self.search.run(clock):
            if chained:
                schedule = realize(problem, self.search.packing())
                clock.count_ms(decoding_ms(problem, LISTED))
                if best is None or schedule.makespan(problem) < best.makespan(problem):
                    best = schedule
        last = realize(problem, self.search.packing())
        return Improvement((last,) if best is None or last.makespan(problem) <= best.makespan(problem) else (best,))


@dataclass
class Prover:
    """Z3 on the whole problem, from both sides of the gap, where it is small enough."""

    problem: Problem
    name: str = "z3 gap search"
    hope: float = TRUST
    proves: bool = True
    proof: Proof | None = None

    def slice(self, incumbent: Incumbent) -> float | None:
        size = self.problem.gpus * math.comb(len(self.problem.jobs), 2)
        return size / CLAUSES_PER_MS if size <= PROVABLE and incumbent.makespan > incumbent.bound else None

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        from arachnec.solver.z3_proof import Proof  # Z3 takes a while to load

        if self.proof is None:
            self.proof = Proof(self.problem, incumbent.shortest, incumbent.bound, rng.randrange(2**31))
        self.proof.run(incumbent.shortest, incumbent.bound, clock)
        return Improvement((self.proof.schedule,), self.proof.low)


@dataclass
class Transformed:
    """An improver of another problem; ``back`` makes its schedules ones of the problem itself.

    ``view`` names the other problem; ``incumbent`` is its own, counted alone.
    """

    view: str
    improver: Improver
    incumbent: Incumbent
    back: Callable[[Schedule], Schedule]
    proves: bool = False

    @property
    def name(self) -> str:
        return f"{self.view}: {self.improver.name}"

    @property
    def hope(self) -> float:
        return self.improver.hope

    def slice(self, incumbent: Incumbent) -> float | None:
        self.incumbent.bound = max(self.incumbent.bound, incumbent.bound)
        return None if self.incumbent.closed else self.improver.slice(self.incumbent)

    def improve(self, incumbent: Incumbent, clock: Clock, rng: random.Random) -> Improvement:
        improvement = self.improver.improve(self.incumbent, clock, rng)
        for schedule in improvement.schedules:
            self.incumbent.offer(schedule, clock)
        return Improvement(tuple(map(self.back, improvement.schedules)))


def decoding_ms(problem: Problem, times: float) -> float:
    """What decoding all jobs so many times takes."""
    return times * len(problem.jobs) / OPERATIONS_PER_MS
