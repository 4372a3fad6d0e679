"""Simulated annealing over degrees and order, decoded by list scheduling.

For tens of cascades on tens of GPUs, where a decoded schedule costs a few dozen microseconds and a local search that
takes nothing worse soon stands still. A try changes degrees or moves a cascade in the order; a longer makespan is taken
with probability exp(-excess / temperature), and the temperature falls from 3 % to 0.1 % of the makespan (Kirkpatrick,
Gelatt and Vecchi, Science 1983).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from arachnec.passes.schedule_heuristics import list_schedule, nearest_order
from arachnec.passes.schedule_problem import Problem, Schedule

HOT, COLD = 0.03, 0.001  # of the makespan
STEPS = (-4, -2, -1, 1, 2, 4)  # places by which a degree changes


def anneal(problem: Problem, start: Schedule, dice: random.Random, used: Callable[[int], float]) -> Schedule:
    """The shortest schedule seen; ``used(tries)`` is the part of the effort that is spent, 1 at the end."""
    if not problem.jobs:
        return start
    order = start_order(start)
    current, now = start, start.makespan(problem)
    best, least = current, now
    tries = 0
    while (spent := used(tries)) < 1:
        tries += 1
        picks, wished = neighbour(problem, current.picks, order, dice)
        tried = list_schedule(problem, picks, wished)
        reached = tried.makespan(problem)
        temperature = least * HOT * (COLD / HOT) ** spent
        if reached <= now or dice.random() < math.exp((now - reached) / temperature):
            current, order, now = tried, wished, reached
            if reached < least:
                best, least = tried, reached
    return best


def start_order(schedule: Schedule) -> list[int]:
    return sorted(range(len(schedule.starts)), key=lambda j: (schedule.starts[j], j))


def neighbour(
    problem: Problem, picks: Sequence[int], order: list[int], dice: random.Random
) -> tuple[list[int], list[int]]:
    """One or two jobs at another degree, or one elsewhere in the order, or both."""
    changed, wished = list(picks), list(order)
    both = dice.random()
    if both < 0.7:
        for _ in range(dice.choice((1, 1, 2))):
            j = dice.randrange(len(changed))
            last = len(problem.jobs[j].choices) - 1
            step = dice.choice(STEPS)
            changed[j] = min(max(changed[j] + step, 0), last) if dice.random() < 0.8 else dice.randint(0, last)
    if both > 0.4:
        wished.insert(dice.randrange(len(wished)), wished.pop(dice.randrange(len(wished))))
        wished = list(nearest_order(problem, wished))
    return changed, wished
