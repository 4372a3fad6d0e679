"""Z3's part where it is given a problem, or its tail, whole: shorter schedules, and the proof that none is shorter."""

from __future__ import annotations

from arachnec.solver.block_packing import Options, Packing, realize
from arachnec.solver.budget import Z3_STEPS_PER_STEP, Clock
from arachnec.solver.problem import Problem, Schedule, Solution, violations
from arachnec.solver.tail import tail_of, with_tail

WHOLE = 24  # jobs that Z3 is given at once
PACKING_SHARE = 0.1  # of what is left, for one question about the whole as a packing
QUESTION_MS = 700  # of Z3 on two blocks
TAIL_MS = 700  # of one question about a tail
MOST_RUNNING = 48  # jobs that run into a tail: each is a row of the model


def prove_packing(
    problem: Problem, options: Options, incumbent: Solution, clock: Clock, seed: int, *, exact: bool
) -> Solution:
    """The best packing in aligned blocks by bisection, then the proof that no other schedule is shorter.

    ``exact`` says that no packing is shorter than the incumbent.

    Sets of GPUs that are no aligned blocks can make a schedule shorter still, so those are asked for next
    (``solver.gap_search``), and at once where that is quick.
    """
    from arachnec.solver.gap_search import squeeze, squeeze_in_steps
    from arachnec.solver.z3_packing import find_packing
    from arachnec.solver.z3_schedule import Answer

    schedule, bound = incumbent.schedule, incumbent.bound
    high = schedule.makespan(problem)
    low, horizon = bound, high - 1
    everything, nothing = range(len(problem.jobs)), [0] * problem.gpus
    while low < high and clock.any_left() and len(problem.jobs) > WHOLE and not exact:
        effort = clock.effort(min(clock.left() * PACKING_SHARE, QUESTION_MS))
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
    if found.proved or not clock.any_left():
        return found
    if clock.steps is not None:
        return squeeze_in_steps(problem, found, steps=clock.steps * Z3_STEPS_PER_STEP, seed=seed)
    return squeeze(problem, found, milliseconds=clock.left(), seed=seed, from_above=exact)


def prove(problem: Problem, incumbent: Solution, clock: Clock, seed: int) -> Solution:
    """Bisection by Z3 until bound and makespan meet or the budget is spent.

    The first question is whether anything beats the incumbent: after a good heuristic the answer is often no, and that
    no is the proof.
    """
    from arachnec.solver.z3_schedule import Answer, find_schedule

    schedule, low = incumbent.schedule, incumbent.bound
    high = schedule.makespan(problem)
    horizon = high - 1
    while low < high and clock.any_left():
        answer, found = find_schedule(problem, horizon, seed=seed, effort=clock.effort(clock.left()))
        if answer is Answer.IMPOSSIBLE:
            low = horizon + 1
        elif found is not None and not violations(problem, found):
            schedule, high = found, found.makespan(problem)
        else:
            break
        horizon = (low + high - 1) // 2
    return Solution(schedule, incumbent.area_bound, low, low >= high)


def shorter_tail(problem: Problem, schedule: Schedule, bound: int, size: int, clock: Clock, seed: int) -> Schedule:
    """The schedule with the best tail of ``size`` jobs that Z3 finds, by bisection; itself where there is no better."""
    from arachnec.solver.z3_schedule import Answer, find_schedule

    tail = tail_of(problem, schedule, size)
    if tail.running > MOST_RUNNING:
        return schedule
    high = schedule.makespan(problem) - tail.begin
    low = max(bound - tail.begin, 0)
    horizon = high - 1
    while low < high and clock.left() > 0:
        answer, found = find_schedule(
            tail.problem, horizon, seed=seed, effort=clock.effort(min(clock.left(), TAIL_MS)), running=tail.running
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
