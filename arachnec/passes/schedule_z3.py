"""Degrees and start times for all cascades: a bound, heuristics in milliseconds, then Z3 improves and proves.

1. A lower bound that holds for every schedule (``bound``).
2. The best packing in aligned blocks, list schedule or fixed layout (``scheduling.blocks``, ``scheduling.heuristics``).
3. Large-neighbourhood search on the packing, with Z3 on two blocks where it stalls (``scheduling.repack``); annealing
   where jobs wait for others or blocks waste GPUs (``scheduling.anneal``).
4. Of a few jobs that do not wait, the shortest packing (``scheduling.exact``).
5. Small problems go to Z3 whole, by bisection between bound and incumbent, until the incumbent is proved optimal or the
   budget is spent (``scheduling.matrix``; with precedence ``scheduling.window``). Of larger ones with precedence Z3
   improves the tail (``scheduling.tail``), taking turns with annealing.

The module then says makespan, bound, and whether the makespan was proved optimal. ``bound`` stays the bound of step 1
unless Z3 excluded more than it: then it is the shortest makespan not excluded, which equals the makespan where that is
proved optimal.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.nodes import Level, Module
from arachnec.passes.base import Duration, Pass
from arachnec.passes.bound import lower_bound
from arachnec.passes.bound_mixed import mixed_bound
from arachnec.passes.cost import CostModel
from arachnec.passes.scheduling.anneal import anneal_by_turns
from arachnec.passes.scheduling.blocks import Options, Packing, Placed, best_packing, options_of, realize
from arachnec.passes.scheduling.decode import justified
from arachnec.passes.scheduling.fixed import best_one_degree
from arachnec.passes.scheduling.heuristics import MANY_JOBS, best_heuristic, quick_list_schedule
from arachnec.passes.scheduling.mixed import best_on_mixed
from arachnec.passes.scheduling.module import problem_of, scheduled
from arachnec.passes.scheduling.placed import (
    Measure,
    Placing,
    best_placed,
    few_layouts,
    named_layouts,
    placing_is_quick,
)
from arachnec.passes.scheduling.problem import TICKS, Effort, Problem, Schedule, Solution, violations
from arachnec.passes.scheduling.repack import Repacking
from arachnec.passes.scheduling.tail import tail_of, with_tail
from arachnec.passes.scheduling.widths import Nested, nested
from arachnec.passes.stage_sizes import times_of

DEFAULT_BUDGET = Duration(2000.0)
WHOLE = 24  # jobs that Z3 is given at once
FEW = 8  # jobs up to which start times are quick
WHOLE_PACKED = 40  # where none waits for another
GOOD = 1.02  # times the bound
CLOSE = 1.003  # times the bound
PACKED_FIRST = 0.5  # of the budget for packings, where jobs wait for others or Z3 is given the whole
ANNEALED_SHARE = 0.1  # where such jobs are few, or blocks waste GPUs
ANNEALED = 300  # jobs of which annealing tries hundreds of schedules in the time of one repacking
PROMISING = 1.05  # times the shortest schedule: a packing that is longer is not worth improving
WASTE = 1.003  # times the least area, above which blocks do
EXACT_SHARE = 0.35  # of the budget, for the shortest packing of a few jobs
PACKING_SHARE = 0.1  # of what is left, for one question about the whole as a packing
QUESTION_MS = 700  # of Z3 on two blocks
TRIES = 4000  # of repacking what Z3 is given whole, where time allows
TRIES_PER_STEP = 20  # of annealing, where steps are counted
TRIES_OF_FEW = 40  # of annealing one job, doubled by every other one: few jobs are soon tried in all ways
TURN_SHARE = 0.6  # of what is left, for the annealing of one turn
MIN_SHARE = 50.0  # ms
TAILS = (8, 12, 16)  # jobs
TAIL_MS = 700  # of one question about a tail
MOST_RUNNING = 48  # jobs that run into a tail: each is a row of the model
MOST_JUSTIFIED = 1000  # jobs, of a schedule that is not good: milliseconds
FIXED_LAYOUTS = 4096  # jobs x GPUs up to which fixed layouts are tried too: they cost milliseconds
Z3_STEPS_PER_STEP = 20_000
MIXED_SHARE = 0.3  # of the budget, for schedules for fewer GPUs where nodes differ
LEAST_PLACING = 0.1  # of the budget
BEFORE_PLACING = 0.3  # of the budget; the rest goes on with placed makespans, where those are longer
PLACINGS = 1.3  # times what placing the first of many cascades took: set aside for placing the last
LATE = 1.02  # times the bound: a placed schedule that ends later is compared with fixed layouts
GROUPS_SHARE = 0.25  # of what is left then, for an integer program over groups
PACKED_SHARE = 0.25  # of what is left, for annealing before Z3 is given a packing whole
SEARCH_SHARE = 0.7  # of what is left, for annealing before Z3 is given chains whole


@dataclass(frozen=True)
class ScheduleZ3(Pass):
    """The default scheduler.

    ``budget`` limits the wall time of the search; 0ms gives the best heuristic at once. ``steps`` limits it by a count
    of work instead, so that equal seeds and steps give equal schedules on any machine, however loaded.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    budget: Duration = DEFAULT_BUDGET
    seed: int = 0
    steps: int | None = None

    def run(self, module: Module) -> Module:
        started = time.perf_counter()
        cost = CostModel(module)
        problem = problem_of(module, cost)
        # measured cascades take as long anywhere
        anywhere = not cost.kinds and all(map(times_of, module.cascades))
        if anywhere:
            return scheduled(module, cost, problem, solve(problem, Clock(started, self.budget, self.steps), self.seed))
        if not cost.kinds and not placing_is_quick(problem):
            return scheduled(module, cost, problem, self._on_nodes(module, cost, problem, started))
        share = BEFORE_PLACING if placing_is_quick(problem) else 1.0
        found = solve(problem, Clock(started, self.budget * share, self.steps), self.seed)
        if cost.kinds and problem.jobs:
            until = Clock(started, self.budget * (share + MIXED_SHARE), self.steps)
            schedule = best_on_mixed(module, cost, problem, found.schedule, lambda: until.left() <= 0)
            found = replace(found, schedule=schedule, proved=False)
        # of devices that differ the problem, and so its bound, counts all as the fastest
        real = mixed_bound(module, cost, problem, found.area_bound) if cost.kinds else found.area_bound
        # whatever the search took, placing gets something
        least = time.perf_counter() - started + self.budget * LEAST_PLACING / 1e3
        clock = Clock(started, max(self.budget, least * 1e3), self.steps)
        schedule = best_placed(
            module,
            cost,
            problem,
            replace(found, bound=max(found.bound, real), area_bound=real),
            seed=self.seed,
            steps=max(TRIES, TRIES_OF_FEW * 2 ** min(len(problem.jobs), 20)) if self.steps is None else self.steps,
            seconds=0.0 if self.steps is not None else max(0.0, clock.left()) * GROUPS_SHARE / 1e3,
            stop=lambda: clock.left() <= 0,
        )
        return scheduled(module, cost, problem, _with(found, schedule, problem))

    def _on_nodes(self, module: Module, cost: CostModel, problem: Problem, started: float) -> Solution:
        """Of many cascades: with degrees whose blocks nest, so that it can be placed as it is.

        Two placements are measured, of the first packing and of the last; the first one's time is set aside for the
        last. Between them come layouts that others train with, and after them, where that is late and time is left,
        those of one degree.
        """
        bound = lower_bound(problem)
        clock = Clock(started, self.budget, self.steps)
        inside, first = first_nested(problem, cost.cluster.gpus, bound, clock)
        whole = inside.whole(first.schedule)
        if not _any_left(clock):
            return Solution(whole, bound, bound, whole.makespan(problem) <= bound, first.ms)
        trial = Placing(Measure(module, cost, problem), whole, clock.left)
        # what others train with is judged first, for half of the budget at most
        named = named_layouts(module, cost, problem, self.seed, 0.0)
        while clock.left() - trial.slowest * PLACINGS > self.budget / 2 and (layout := next(named, None)) is not None:
            trial.offer(layout)
        until = replace(clock, budget=clock.budget - trial.slowest * PLACINGS)
        if first.options is not None and first.packed is not None:
            found = repack(inside.problem, first.options, first.packed, first.schedule, bound, until, self.seed)
            trial.offer(inside.whole(found))
        if trial.length - trial.measure.ending.least > LATE * bound / TICKS:
            layouts = few_layouts(problem)
            while trial.slowest * PLACINGS <= clock.left() and (layout := next(layouts, None)) is not None:
                trial.offer(layout)
        return Solution(trial.best, bound, bound, trial.best.makespan(problem) <= bound, first.ms)


def _with(found: Solution, schedule: Schedule, problem: Problem) -> Solution:
    """The solution with another schedule in the place of its own."""
    if schedule == found.schedule:
        return found
    return replace(found, schedule=schedule, proved=schedule.makespan(problem) <= found.bound)


@dataclass(frozen=True)
class Clock:
    """The budget: wall time from ``started`` in ms, or, where ``steps`` is given, a count of work alone."""

    started: float
    budget: float
    steps: int | None = None

    def spent(self) -> float:
        """ms of wall time."""
        return (time.perf_counter() - self.started) * 1e3

    def left(self) -> float:
        """ms of wall time; without end where work is counted instead."""
        if self.steps is not None:
            return float("inf")
        return self.budget - self.spent()


def solve(problem: Problem, clock: Clock, seed: int) -> Solution:
    """The best schedule within the budget."""
    bound = lower_bound(problem)
    first = first_schedule(problem, bound, clock)
    schedule = best_first(problem, first.schedule, bound)
    return replace(search(problem, first.options, first.packed, schedule, bound, clock, seed), first_ms=first.ms)


@dataclass(frozen=True)
class First:
    """The first schedule and the packing it comes from; ``ms`` is when it was there."""

    schedule: Schedule
    options: Options | None
    packed: Packing | None
    ms: float


def first_schedule(problem: Problem, bound: int, clock: Clock) -> First:
    """A packing in aligned blocks where there is one, else a list schedule."""
    options = options_of(problem)
    packed = best_packing(problem, options, bound) if options is not None and problem.jobs else None
    schedule = realize(problem, packed) if packed is not None else quick_list_schedule(problem, bound)
    return First(schedule, options, packed, clock.spent())


def first_nested(problem: Problem, node: int, bound: int, clock: Clock) -> tuple[Nested, First]:
    """The first schedule in blocks that nest: that of the chain of widths with the shortest packing."""
    tried = []
    for inside in nested(problem, node, bound) or [Nested.all_of(problem)]:
        tried.append((inside, first_schedule(inside.problem, bound, clock)))
        if not _any_left(clock):
            break
    inside, first = min(tried, key=lambda pair: pair[1].schedule.makespan(pair[0].problem))
    return inside, replace(first, ms=tried[0][1].ms)


def search(
    problem: Problem,
    options: Options | None,
    packed: Packing | None,
    schedule: Schedule,
    bound: int,
    clock: Clock,
    seed: int,
) -> Solution:
    """The first schedule made shorter, or proved optimal, within the budget."""
    if options is not None and packed is not None:
        if not _chained(problem) and FEW < len(problem.jobs) <= WHOLE_PACKED:
            return search_packed(problem, options, packed, schedule, bound, clock, seed)
        schedule = repack(problem, options, packed, schedule, bound, clock, seed)
    if len(problem.jobs) > WHOLE:
        schedule = improve_by_turns(problem, schedule, bound, clock, seed)
        return Solution(schedule, bound, bound, schedule.makespan(problem) <= bound)
    share = clock.left() * SEARCH_SHARE
    schedule = local_search(problem, schedule, bound, clock, seed, share)
    if schedule.makespan(problem) > bound and _any_left(clock):
        return prove(problem, Solution(schedule, bound, bound, False), clock, seed)
    return Solution(schedule, bound, bound, schedule.makespan(problem) <= bound)


def search_packed(
    problem: Problem,
    options: Options,
    packed: Packing,
    schedule: Schedule,
    bound: int,
    clock: Clock,
    seed: int,
) -> Solution:
    """Few jobs, none of which waits for another: the shortest packing, then Z3's proof, or what is shorter still."""
    exact = False
    if not wasteful(problem, options) and schedule.makespan(problem) > bound and _any_left(clock):
        schedule, exact = pack_exactly(problem, options, schedule, clock)
    if not exact:
        schedule = repack(problem, options, packed, schedule, bound, clock, seed)
        schedule = local_search(problem, schedule, bound, clock, seed, clock.left() * PACKED_SHARE)
    return prove_packing(problem, options, Solution(schedule, bound, bound, False), clock, seed, exact=exact)


def best_first(problem: Problem, schedule: Schedule, bound: int) -> Schedule:
    """The best of this one, fixed layouts and, unless there are many jobs and it is good, list schedules."""
    found = [schedule]
    if len(problem.jobs) <= MANY_JOBS or schedule.makespan(problem) > GOOD * bound:
        found.append(best_heuristic(problem, bound))
    if len(problem.jobs) * problem.gpus <= FIXED_LAYOUTS:
        found.append(best_one_degree(problem))
    best = min(found, key=lambda schedule: schedule.makespan(problem))
    poor = best.makespan(problem) > (CLOSE if _chained(problem) else GOOD) * bound
    return justified(problem, best) if poor and len(problem.jobs) <= MOST_JUSTIFIED else best


def pack_exactly(problem: Problem, options: Options, schedule: Schedule, clock: Clock) -> tuple[Schedule, bool]:
    """The schedule or the shortest packing in aligned blocks, and whether it is certain that no packing is shorter."""
    from arachnec.passes.scheduling.exact import shortest_packing

    floor, asked = clock.left() * (1 - EXACT_SHARE), 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > clock.steps if clock.steps is not None else clock.left() <= floor

    packing, certain = shortest_packing(problem.gpus, options, schedule.makespan(problem), stop)
    return (schedule if packing is None else realize(problem, packing)), certain


def repack(
    problem: Problem, options: Options, packed: Packing, schedule: Schedule, bound: int, clock: Clock, seed: int
) -> Schedule:
    """The schedule, or a shorter one by large-neighbourhood search from ``packed``, with questions to Z3."""
    tries = 0
    chained = _chained(problem)
    small = len(problem.jobs) <= (WHOLE if chained else WHOLE_PACKED)
    if realize(problem, packed).makespan(problem) > PROMISING * schedule.makespan(problem):
        return schedule
    few = len(problem.jobs) <= ANNEALED
    share = 1.0
    if wasteful(problem, options) or (chained and few):
        share = ANNEALED_SHARE
    elif chained or small:
        share = PACKED_FIRST
    floor = clock.left() * (1 - share)

    def stop() -> bool:
        nonlocal tries
        tries += 1
        if small and tries > TRIES:
            return True
        return tries > clock.steps if clock.steps is not None else clock.left() <= floor

    def ask(jobs: Sequence[int], base: Sequence[int], horizon: int, widest: int) -> list[Placed] | None:
        from arachnec.passes.scheduling.packing import find_packing

        effort = _effort(clock, min(clock.left() - floor, QUESTION_MS))
        return find_packing(jobs, options, problem.heads, base, horizon, widest, seed=seed, effort=effort)[1]

    search = Repacking(problem, options, packed, bound, seed=seed, ask=None if small else ask)
    while search.run(stop):
        if chained:
            schedule = min(schedule, realize(problem, search.packing()), key=lambda found: found.makespan(problem))
    return min(schedule, realize(problem, search.packing()), key=lambda found: found.makespan(problem))


def wasteful(problem: Problem, options: Options) -> bool:
    """Whether blocks of powers of 2 need more area than the jobs' own degrees."""
    least = sum(min(choice.area for choice in job.choices) for job in problem.jobs)
    return sum(min(option.width * option.ticks for option in row) for row in options) > WASTE * least


def local_search(problem: Problem, schedule: Schedule, bound: int, clock: Clock, seed: int, share: float) -> Schedule:
    """Annealing for ``share`` ms, or for the steps of the clock."""
    if not _any_left(clock):
        return schedule
    most = clock.steps * TRIES_PER_STEP if clock.steps is not None else TRIES_OF_FEW * 2 ** min(len(problem.jobs), 30)
    begin = clock.spent()

    def used(tries: int) -> float:
        return max(tries / max(1, most), 0.0 if clock.steps is not None else (clock.spent() - begin) / max(share, 1e-3))

    return anneal_by_turns(problem, schedule, bound, random.Random(seed), used)


def improve_by_turns(problem: Problem, schedule: Schedule, bound: int, clock: Clock, seed: int) -> Schedule:
    """Local search over the whole, then Z3 on tails of growing size, again and again until the budget is spent."""
    rounds = 0
    while _any_left(clock) and schedule.makespan(problem) > bound and (clock.steps is None or rounds == 0):
        share = max(MIN_SHARE, clock.left() * TURN_SHARE)
        schedule = local_search(problem, schedule, bound, clock, seed + rounds, share)
        for size in TAILS:
            schedule = shorter_tail(problem, schedule, bound, size, clock, seed + rounds)
        rounds += 1
    return schedule


def shorter_tail(problem: Problem, schedule: Schedule, bound: int, size: int, clock: Clock, seed: int) -> Schedule:
    """The schedule with the best tail of ``size`` jobs that Z3 finds, by bisection; itself where there is no better."""
    from arachnec.passes.scheduling.window import Answer, find_schedule

    tail = tail_of(problem, schedule, size)
    if tail.running > MOST_RUNNING:
        return schedule
    high = schedule.makespan(problem) - tail.begin
    low = max(bound - tail.begin, 0)
    horizon = high - 1
    while low < high and clock.left() > 0:
        answer, found = find_schedule(
            tail.problem, horizon, seed=seed, effort=_effort(clock, min(clock.left(), TAIL_MS)), running=tail.running
        )
        if found is None:
            if answer is Answer.UNKNOWN or horizon == high - 1:
                break
            low = horizon + 1
        else:
            joined = with_tail(schedule, tail, found)
            if violations(problem, joined):
                break
            schedule, high = joined, found.makespan(tail.problem)
        horizon = (low + high - 1) // 2
    return schedule


def prove_packing(
    problem: Problem, options: Options, incumbent: Solution, clock: Clock, seed: int, *, exact: bool
) -> Solution:
    """The best packing in aligned blocks by bisection, then the proof that no other schedule is shorter.

    ``exact`` says that no packing is shorter than the incumbent.

    Sets of GPUs that are no aligned blocks can make a schedule shorter still, so those are asked for next
    (``scheduling.squeeze``), and at once where that is quick.
    """
    from arachnec.passes.scheduling.packing import find_packing
    from arachnec.passes.scheduling.squeeze import squeeze, squeeze_in_steps
    from arachnec.passes.scheduling.window import Answer

    schedule, bound = incumbent.schedule, incumbent.bound
    high = schedule.makespan(problem)
    low, horizon = bound, high - 1
    everything, nothing = range(len(problem.jobs)), [0] * problem.gpus
    while low < high and _any_left(clock) and len(problem.jobs) > WHOLE and not exact:
        effort = _effort(clock, min(clock.left() * PACKING_SHARE, QUESTION_MS))
        answer, placed = find_packing(
            everything, options, problem.heads, nothing, horizon, problem.gpus, seed=seed, effort=effort
        )
        if answer is Answer.IMPOSSIBLE:
            low = horizon + 1
        elif placed is not None:
            schedule = realize(problem, Packing(tuple(placed), ()))
            high = schedule.makespan(problem)
        else:
            break
        horizon = (low + high - 1) // 2
    found = Solution(schedule, incumbent.area_bound, bound, bound >= high)
    if found.proved or not _any_left(clock):
        return found
    if clock.steps is not None:
        return squeeze_in_steps(problem, found, steps=clock.steps * Z3_STEPS_PER_STEP, seed=seed)
    return squeeze(problem, found, milliseconds=clock.left(), seed=seed, from_above=exact)


def prove(problem: Problem, incumbent: Solution, clock: Clock, seed: int) -> Solution:
    """Bisection by Z3 until bound and makespan meet or the budget is spent.

    The first question is whether anything beats the incumbent: after a good heuristic the answer is often no, and that
    no is the proof.
    """
    from arachnec.passes.scheduling.window import Answer, find_schedule

    schedule, low = incumbent.schedule, incumbent.bound
    high = schedule.makespan(problem)
    horizon = high - 1
    while low < high and _any_left(clock):
        answer, found = find_schedule(problem, horizon, seed=seed, effort=_effort(clock, clock.left()))
        if answer is Answer.IMPOSSIBLE:
            low = horizon + 1
        elif found is not None and not violations(problem, found):
            schedule, high = found, found.makespan(problem)
        else:
            break
        horizon = (low + high - 1) // 2
    return Solution(schedule, incumbent.area_bound, low, low >= high)


def _chained(problem: Problem) -> bool:
    return any(job.before for job in problem.jobs)


def _effort(clock: Clock, wall: float) -> Effort:
    """Of one question: ``wall`` ms, or steps where the clock counts those."""
    if clock.steps is not None:
        return Effort(clock.steps * Z3_STEPS_PER_STEP, None)
    return Effort(None, int(wall))


def _any_left(clock: Clock) -> bool:
    return clock.steps > 0 if clock.steps is not None else clock.left() > 0
