"""The search for short schedules, and what becomes of the budget: packings, annealing, Z3, in this order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from arachnec.solver.annealing import anneal_by_turns
from arachnec.solver.block_packing import Options, Packing, Placed, best_packing, options_of, realize
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import Clock
from arachnec.solver.decoder import justified
from arachnec.solver.large_neighbourhood import Repacking
from arachnec.solver.list_schedule import MANY_JOBS, best_heuristic, quick_list_schedule
from arachnec.solver.problem import Problem, Schedule, Solution
from arachnec.solver.proof import QUESTION_MS, WHOLE, prove, prove_packing, shorter_tail
from arachnec.solver.static_layouts import best_one_degree
from arachnec.solver.widths import Nested, nested

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
TRIES = 4000  # of repacking what Z3 is given whole, where time allows
TRIES_PER_STEP = 20  # of annealing, where steps are counted
TRIES_OF_FEW = 40  # of annealing one job, doubled by every other one: few jobs are soon tried in all ways
TURN_SHARE = 0.6  # of what is left, for the annealing of one turn
MIN_SHARE = 50.0  # ms
TAILS = (8, 12, 16)  # jobs
MOST_JUSTIFIED = 1000  # jobs, of a schedule that is not good: milliseconds
FIXED_LAYOUTS = 4096  # jobs x GPUs up to which fixed layouts are tried too: they cost milliseconds
PACKED_SHARE = 0.25  # of what is left, for annealing before Z3 is given a packing whole
SEARCH_SHARE = 0.7  # of what is left, for annealing before Z3 is given chains whole


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
        if not clock.any_left():
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
    if schedule.makespan(problem) > bound and clock.any_left():
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
    if not wasteful(problem, options) and schedule.makespan(problem) > bound and clock.any_left():
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
    from arachnec.solver.exact_packing import shortest_packing

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
        from arachnec.solver.z3_packing import find_packing

        effort = clock.effort(min(clock.left() - floor, QUESTION_MS))
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
    if not clock.any_left():
        return schedule
    most = clock.steps * TRIES_PER_STEP if clock.steps is not None else TRIES_OF_FEW * 2 ** min(len(problem.jobs), 30)
    begin = clock.spent()

    def used(tries: int) -> float:
        return max(tries / max(1, most), 0.0 if clock.steps is not None else (clock.spent() - begin) / max(share, 1e-3))

    return anneal_by_turns(problem, schedule, bound, random.Random(seed), used)


def improve_by_turns(problem: Problem, schedule: Schedule, bound: int, clock: Clock, seed: int) -> Schedule:
    """Local search over the whole, then Z3 on tails of growing size, again and again until the budget is spent."""
    rounds = 0
    while clock.any_left() and schedule.makespan(problem) > bound and (clock.steps is None or rounds == 0):
        share = max(MIN_SHARE, clock.left() * TURN_SHARE)
        schedule = local_search(problem, schedule, bound, clock, seed + rounds, share)
        for size in TAILS:
            schedule = shorter_tail(problem, schedule, bound, size, clock, seed + rounds)
        rounds += 1
    return schedule


def _chained(problem: Problem) -> bool:
    return any(job.before for job in problem.jobs)
