"""The default portfolio on plain numbers: first schedules in milliseconds, then every improver that fits the budget."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from arachnec.solver.block_packing import Options, Packing, options_of, packings, realize
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import GRACE, LISTED, Clock
from arachnec.solver.decoder import justified, left_shifted
from arachnec.solver.improvers import Annealing, LargeNeighbourhoods, Prover, decoding_ms
from arachnec.solver.list_schedule import list_schedules
from arachnec.solver.portfolio import Improver, Incumbent, run
from arachnec.solver.problem import Problem, Schedule, Solution
from arachnec.solver.static_layouts import one_degree


def solve(problem: Problem, clock: Clock, seed: int, without: Collection[str] = ()) -> Solution:
    """The best schedule within the budget, found by all improvers but those named in ``without``."""
    bound = lower_bound(problem)
    first = First.of(problem, bound, clock)
    incumbent = Incumbent(problem, first.schedule, bound)
    wanted = [improver for improver in first.improvers() if improver.name not in without]
    run(wanted, incumbent, clock, random.Random(seed))
    return solution(incumbent, bound, first.ms)


def solution(incumbent: Incumbent, area_bound: int, first_ms: float) -> Solution:
    schedule = incumbent.schedule
    proved = schedule.makespan(incumbent.problem) <= incumbent.bound
    return Solution(schedule, area_bound, incumbent.bound, proved, first_ms)


@dataclass(frozen=True)
class First:
    """The first schedule, and the packing where there is one.

    ``ms`` of wall time after the start a complete schedule was there.
    """

    problem: Problem
    schedule: Schedule
    options: Options | None
    packing: Packing | None
    ms: float

    @staticmethod
    def of(problem: Problem, bound: int, clock: Clock) -> First:
        options = options_of(problem) if problem.jobs else None
        if options is None:
            return First.listed(problem, next(list_schedules(problem, bound)), bound, clock.wall())
        ms = 0.0
        for packing in packings(problem, options, bound):
            best, ms = realize(problem, packing), ms or clock.wall()
        return replace(First.listed(problem, best, bound, ms), options=options, packing=packing)

    @staticmethod
    def listed(problem: Problem, best: Schedule, bound: int, ms: float) -> First:
        """A schedule that was there after so many ms, or a better list schedule, where those take no time."""
        within = int(GRACE / (decoding_ms(problem, LISTED) + 1e-6))
        tried = [best, *islice(_heuristics(problem, bound), within)]
        best = min(tried, key=lambda schedule: schedule.makespan(problem))
        if within:
            best = min(best, justified(problem, best), key=lambda schedule: schedule.makespan(problem))
        return First(problem, best, None, None, ms)

    def improvers(self) -> Iterator[Improver]:
        yield Annealing(self.problem)
        yield Prover(self.problem)
        if self.options is not None and self.packing is not None:
            yield LargeNeighbourhoods(self.problem, self.options, self.packing)


def _heuristics(problem: Problem, bound: int) -> Iterator[Schedule]:
    yield from list_schedules(problem, bound)
    if problem.jobs:
        for schedule in one_degree(problem):
            yield schedule
            yield left_shifted(problem, schedule)  # as it is placed
