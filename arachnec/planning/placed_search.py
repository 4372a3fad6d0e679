"""The schedule whose iteration is shortest once it has been placed.

A scheduler counts GPUs; ``place`` then finds that a group is on two nodes and takes longer, and what waits for it
starts later. Two schedules of equal length can differ by several percent there. So candidates are placed, the layouts
that others train with and annealed schedules among them, and compared by when the gradients would be summed
(``planning.exposed_sync``). Groups that share links slow each other down, too, which a simulation says
(``planning.simulated_objective``): it decides between the shortest candidates and the layouts of others, and a local
search over degrees and order goes on with it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module
from arachnec.ir.values import Quantity
from arachnec.planning.candidates import group_layouts, list_schedules, named_layouts
from arachnec.planning.exposed_sync import Ending
from arachnec.planning.formulate import decided
from arachnec.planning.placement import best_placements
from arachnec.planning.simulated_objective import simulated_ms
from arachnec.solver.annealing import anneal, neighbour
from arachnec.solver.decoder import start_order
from arachnec.solver.list_schedule import list_schedule
from arachnec.solver.problem import TICKS, Problem, Schedule, Solution

MOST = 4096  # jobs x GPUs up to which placing a schedule costs 2 to 15 ms
MOST_SIMULATED = 32768  # jobs x GPUs up to which simulating one costs 0.1 s at most
ANYWHERE = 40  # jobs that cost 0.06 s to place and 0.2 s to simulate even on 1024 GPUs
CANDIDATES = 24  # of the shortest, that are placed
SIMULATED = 8  # of the shortest of those, that are simulated
PROGRAM = 0.4  # for FlexSP's integer program
SEARCHING = 0.6  # for a search that does not simulate
CLOSE = 1e-6  # of the bound, by which a simulated iteration may be longer and nothing else is tried
COOLINGS = 3  # runs of annealing, from the shortest candidates
ANNEALING = 0.2  # of the seconds given, for one of them
TRIES_PER_STEP = 20  # of one of them, for each step of the placed search, where steps are counted and not time


def best_placed(
    module: Module,
    cost: CostModel,
    problem: Problem,
    found: Solution,
    *,
    seed: int,
    steps: int,
    seconds: float,
    stop: Callable[[], bool],
) -> Schedule:
    """The schedule found, or one whose iteration is shorter once placed; ``steps`` tries, or until ``stop`` says so.

    Parts of ``seconds`` of wall time go to the integer program of FlexSP and to a genetic search for one more
    candidate each, to annealing and to a search that does not simulate; 0 leaves the former two out and counts the
    tries of the others.
    """
    best = found.schedule
    if not placing_is_quick(problem) or stop():
        return best
    measure = Measure(module, cost, problem)
    least = found.bound / TICKS * (1 + CLOSE) + measure.ending.least
    judged = {best: measure.simulated(best)}
    if judged[best] <= least:
        return best
    slow = len(problem.jobs) * problem.gpus > MOST
    for schedule in named_layouts(module, cost, problem, seed, seconds):
        if slow and stop():  # a few milliseconds are worth more than keeping to the clock
            break
        judged[schedule] = measure.simulated(schedule)
    made = chain(group_layouts(problem, seconds * PROGRAM), list_schedules(problem, found.area_bound))
    candidates = [*judged, *takewhile(lambda _: not stop(), made)]
    dice = random.Random(seed)
    starts = islice(dict.fromkeys(sorted(candidates, key=lambda schedule: schedule.makespan(problem))), COOLINGS)
    candidates += [anneal(problem, start, dice, effort(steps, seconds, stop)) for start in starts]
    rated = {best: measure.of(best)}
    for schedule in islice(sorted(candidates, key=lambda schedule: schedule.makespan(problem)), CANDIDATES):
        if stop():
            break
        if schedule.makespan(problem) / TICKS < min(rated.values()):
            rated[schedule] = measure.of(schedule)
    for schedule in sorted(rated, key=rated.__getitem__)[:SIMULATED]:
        if schedule not in judged and not stop():
            judged[schedule] = measure.simulated(schedule)
    until = time.perf_counter() + seconds * SEARCHING
    best = min(rated, key=rated.__getitem__)
    search = Search(measure, least, dice, steps)
    best = search.run(best, rated[best], lambda: stop() or (seconds > 0 and time.perf_counter() > until))
    if not stop():
        judged[best] = measure.simulated(best)
    best = min(judged, key=judged.__getitem__)
    return search.run(best, judged[best], stop, simulate=True)


@dataclass(frozen=True)
class Search:
    """Local searches over degrees and order, of ``steps`` tries each, or until one is as short as ``least``."""

    measure: Measure
    least: float  # ms
    dice: random.Random
    steps: int

    def run(self, start: Schedule, length: float, stop: Callable[[], bool], *, simulate: bool = False) -> Schedule:
        """The shortest schedule seen, placed and perhaps simulated; ``length`` is that of the first, in ms."""
        problem, best, order = self.measure.problem, start, start_order(start)
        for _ in range(self.steps):
            if length <= self.least or stop():
                break
            picks, wished = neighbour(problem, best.picks, order, self.dice)
            tried = list_schedule(problem, picks, wished)
            if tried.makespan(problem) / TICKS > length:
                continue
            reached = self.measure.of(tried)
            if simulate and reached <= length:
                reached = self.measure.simulated(tried)
            if reached <= length:
                best, order, length = tried, wished, reached
        return best


class Placing:
    """The shortest of schedules, simulated where that is quick; after the first none for which no time is left.

    ``left`` gives the ms that are left; ``length`` is that of the best, ``slowest`` the most one took, in ms.
    """

    def __init__(self, measure: Measure, first: Schedule, left: Callable[[], float]) -> None:
        self.measure, self.left = measure, left
        quick = len(measure.problem.jobs) * measure.problem.gpus <= MOST_SIMULATED
        self.judge = measure.simulated if quick else measure.of
        began = time.perf_counter()
        self.best, self.length = first, self.judge(first)
        self.slowest = (time.perf_counter() - began) * 1e3

    def offer(self, schedule: Schedule) -> None:
        least = schedule.makespan(self.measure.problem) / TICKS + self.measure.ending.least
        if least >= self.length or self.slowest > self.left():
            return
        began = time.perf_counter()
        length = self.judge(schedule)
        self.slowest = max(self.slowest, (time.perf_counter() - began) * 1e3)
        if length < self.length:
            self.best, self.length = schedule, length


def effort(steps: int, seconds: float, stop: Callable[[], bool]) -> Callable[[int], float]:
    """The spent part of one run of annealing, given its tries."""
    if seconds <= 0:
        return lambda tries: tries / max(1, steps * TRIES_PER_STEP)
    began = time.perf_counter()
    return lambda tries: 1.0 if stop() else (time.perf_counter() - began) / (seconds * ANNEALING)


def placing_is_quick(problem: Problem) -> bool:
    """Whether schedules can be placed by the dozen."""
    return len(problem.jobs) * problem.gpus <= MOST or len(problem.jobs) <= ANYWHERE


class Measure:
    """Of schedules of one problem, placed: ms until gradients are summed; infinite where memory does not hold one."""

    def __init__(self, module: Module, cost: CostModel, problem: Problem) -> None:
        self.module, self.cost, self.problem = module, cost, problem
        self.ending = Ending(module, cost)
        self.chosen: dict[tuple[int, int], Cascade] = {}

    def of(self, schedule: Schedule) -> float:
        placed = self._placed(schedule)
        return math.inf if placed is None else self.ending.of(placed)

    def simulated(self, schedule: Schedule) -> float:
        """What cascades share is counted, too."""
        placed = self._placed(schedule)
        return math.inf if placed is None else simulated_ms(self.module, self.cost.cluster, placed)

    def _placed(self, schedule: Schedule) -> list[Cascade] | None:
        try:
            return best_placements(self._cascades(schedule), self.cost)
        except UserError:
            return None

    def _cascades(self, schedule: Schedule) -> list[Cascade]:
        return [self._cascade(job, *at) for job, at in enumerate(zip(schedule.picks, schedule.starts, strict=True))]

    def _cascade(self, job: int, pick: int, start: int) -> Cascade:
        choice = self.problem.jobs[job].choices[pick]
        begin, end = start / TICKS, (start + choice.ticks) / TICKS
        found = self.chosen.get((job, pick))
        if found is None:
            cascade = self.module.cascades[job]
            found = decided(cascade, self.cost, choice.degree, choice.recompute, begin, end)
            self.chosen[job, pick] = found
        return found.with_attrs(start=Quantity(begin, "ms"), end=Quantity(end, "ms"))
