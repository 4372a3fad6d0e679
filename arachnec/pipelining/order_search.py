"""Find an order for micro-batches of unequal lengths: simulated annealing over the order in which they enter.

Each order is decoded by ``list_schedule``. A move swaps two micro-batches, or takes one to another place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.evaluate import evaluate, held
from arachnec.pipelining.list_schedule import list_schedule
from arachnec.pipelining.one_f_one_b import one_f_one_b
from arachnec.pipelining.order_problem import OrderProblem, lower_bound

WARMTH = 0.02  # of the makespan: how much worse an order may be and still be taken in a third of all cases, at first


@dataclass(frozen=True)
class PlannedOrder:
    """A schedule, when it ends, and the bound that no order of this problem can end before."""

    schedule: PipelineSchedule
    makespan: float
    bound: float

    @property
    def gap(self) -> float:
        return self.makespan / self.bound - 1


def plan_order(problem: OrderProblem, *, split: bool, tries: int = 2000, seed: int = 0) -> PlannedOrder:
    """The best schedule among ``tries`` orders of entry, and 1F1B in arrival order where that respects the limits.

    With ``split`` both halved and whole backwards are tried. No rank ever holds more than its limit. Same problem, same
    seed and same number of tries give the same schedule. ValueError if a micro-batch does not fit on a rank alone.
    """
    entries = [anneal(problem, halves, tries, seed) for halves in ((False, True) if split else (False,))]
    decoded = [list_schedule(problem, entry, halves)[1] for entry, halves in zip(entries, (False, True), strict=False)]
    plans = [(evaluate(schedule, problem.times).makespan, schedule) for schedule in [*_arrival(problem), *decoded]]
    makespan, schedule = min(plans, key=lambda plan: plan[0])
    return PlannedOrder(schedule, makespan, lower_bound(problem, split))


def anneal(problem: OrderProblem, split: bool, tries: int, seed: int) -> Sequence[int]:
    """The order of entry whose list schedule ends first."""
    rng = random.Random(seed)
    count = problem.micro_batches

    def cost(entry: Sequence[int]) -> float:
        return list_schedule(problem, entry, split)[0]

    length = [sum(row[m] for row in problem.times.forward) for m in range(count)]
    arrival = list(range(count))
    starts = [arrival, sorted(arrival, key=lambda m: -length[m]), sorted(arrival, key=lambda m: length[m])]
    now, entry = min(((cost(start), start) for start in starts), key=lambda pair: pair[0])
    best, best_entry = now, entry
    warmth = WARMTH * now
    if count == 1:
        return entry
    for step in range(tries):
        a, b = rng.sample(range(count), 2)
        moved = list(entry)
        if rng.random() < 0.5:
            moved[a], moved[b] = moved[b], moved[a]
        else:
            moved.insert(b, moved.pop(a))
        after = cost(moved)
        if after <= now or rng.random() < math.exp((now - after) / (warmth * (1 - step / tries))):
            now, entry = after, moved
            if now < best:
                best, best_entry = now, entry
    return best_entry


def _arrival(problem: OrderProblem) -> list[PipelineSchedule]:
    if problem.placement != tuple(range(problem.stages)):
        return []
    schedule = one_f_one_b(problem.stages, problem.micro_batches)
    most = held(schedule, problem.saved)
    return [schedule] if all(a <= b for a, b in zip(most, problem.limits, strict=True)) else []
