"""Orders of a pipeline's micro-batches: a list schedule, annealing over it, and k of kFkB by transfer times."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.ir.diagnostic import user_error
from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    PipelineSchedule,
)
from arachnec.pipelining.evaluate import StageTimes, Table, evaluate, held
from arachnec.pipelining.order_problem import OrderProblem, lower_bound
from arachnec.pipelining.schedules import kfkb, one_f_one_b

SLACK = 1 + 1e-12  # of a limit: sums of floats


def list_schedule(problem: OrderProblem, entry: Sequence[int], split: bool) -> tuple[float, PipelineSchedule]:
    """Makespan and schedule for micro-batches that enter as in ``entry``; with ``split``, backwards in halves.

    ValueError if a micro-batch does not fit on a rank alone.

    A gradient that others wait for comes first, of the micro-batch that entered first; then a forward, of the last
    stage that has one, if the memory holds it; then a weight gradient, as filling. A forward is only taken where the
    memory that is left lets the micro-batches already begun on this rank end, in the order in which they entered (the
    banker's rule, Dijkstra 1965). So no order deadlocks that fits alone.
    """
    makespan, orders = _Run(problem, entry, split).run()
    return makespan, PipelineSchedule(tuple(map(tuple, orders)))


class _Run:
    """The state of one simulation."""

    def __init__(self, problem: OrderProblem, entry: Sequence[int], split: bool) -> None:
        times = problem.times
        self.problem, self.entry, self.split = problem, entry, split
        self.position = {micro_batch: k for k, micro_batch in enumerate(entry)}
        ranks, stages = len(problem.hosted), problem.stages
        self.gradient_times = times.activation_gradient if split else problem.backward
        self.free: list[float] = [0.0] * ranks
        self.held: list[float] = [0.0] * ranks
        self.limit = [limit * SLACK for limit in problem.limits]
        self.entered = [0] * stages  # per stage, how many micro-batches have begun
        self.arrived: list[list[float | None]] = [[None] * len(entry) for _ in range(stages)]  # per position
        self.arrived[0] = [0.0] * len(entry)
        self.gradients: list[list[tuple[int, int, float]]] = [[] for _ in range(ranks)]  # position, stage, arrival
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in range(ranks)]
        self.link_free: dict[tuple[int, int], float] = {}
        self.orders: list[list[Action]] = [[] for _ in range(ranks)]
        self.events = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> tuple[float, list[list[Action]]]:
        events, free = self.events, self.free
        while events:
            now, rank = heapq.heappop(events)
            if free[rank] <= now:
                self.act(rank, now)
        actions = (3 if self.split else 2) * self.problem.stages * len(self.entry)
        if sum(map(len, self.orders)) < actions:
            raise ValueError("a micro-batch does not fit on a rank")
        return max(free), self.orders

    def act(self, rank: int, now: float) -> None:
        """Begin the most urgent action, if there is one."""
        ready = self.gradients[rank]
        if ready:
            due = [gradient for gradient in ready if gradient[2] <= now]
            if due:
                gradient = min(due)
                ready.remove(gradient)
                self.backward(rank, gradient[1], self.entry[gradient[0]], now)
                return
        for stage in reversed(self.problem.hosted[rank]):
            k = self.entered[stage]
            if k < len(self.entry):
                there = self.arrived[stage][k]
                if there is not None and there <= now and self.fits(rank, stage, k):
                    self.forward(rank, stage, k, now)
                    return
        if self.weights[rank]:
            stage, micro_batch = self.weights[rank].popleft()
            self.held[rank] -= self.problem.saved[stage][micro_batch]
            length = self.problem.times.weight_gradient[stage][micro_batch]
            self.record(rank, stage, WEIGHT_GRADIENT, micro_batch, now + length)

    def fits(self, rank: int, stage: int, k: int) -> bool:
        saved, hosted = self.problem.saved, self.problem.hosted[rank]
        if self.held[rank] + saved[stage][self.entry[k]] > self.limit[rank]:
            return False
        if len(hosted) == 1:
            return True
        # positions that still have a forward to run here: what they hold if this one begins, and what they will
        begun = range(min(self.entered[own] for own in hosted), max(self.entered[hosted[0]], k + 1))
        holds, wants = [], []
        for other in begun:
            needs = [saved[own][self.entry[other]] for own in hosted]
            has = [other < self.entered[own] or (own, other) == (stage, k) for own in hosted]
            holds.append(sum(need for need, there in zip(needs, has, strict=True) if there))
            wants.append(sum(needs))
        left = self.limit[rank] - sum(holds)
        for hold, want in zip(holds, wants, strict=True):
            if want - hold > left:
                return False
            left += hold
        return True

    def forward(self, rank: int, stage: int, k: int, now: float) -> None:
        micro_batch = self.entry[k]
        self.entered[stage] += 1
        self.held[rank] += self.problem.saved[stage][micro_batch]
        end = now + self.problem.times.forward[stage][micro_batch]
        self.record(rank, stage, FORWARD, micro_batch, end)
        if stage + 1 == self.problem.stages:
            self.gradients[rank].append((k, stage, end))
            return
        target = self.problem.placement[stage + 1]
        arrival = self.sent(rank, target, end, self.problem.times.send_forward, stage, micro_batch)
        self.arrived[stage + 1][k] = arrival
        heapq.heappush(self.events, (arrival, target))

    def backward(self, rank: int, stage: int, micro_batch: int, now: float) -> None:
        end = now + self.gradient_times[stage][micro_batch]
        if self.split:
            self.weights[rank].append((stage, micro_batch))
        else:
            self.held[rank] -= self.problem.saved[stage][micro_batch]
        self.record(rank, stage, ACTIVATION_GRADIENT if self.split else BACKWARD, micro_batch, end)
        if stage == 0:
            return
        target = self.problem.placement[stage - 1]
        arrival = self.sent(rank, target, end, self.problem.times.send_backward, stage - 1, micro_batch)
        self.gradients[target].append((self.position[micro_batch], stage - 1, arrival))
        heapq.heappush(self.events, (arrival, target))

    def sent(
        self, rank: int, target: int, end: float, sends: Sequence[Sequence[float]], cut: int, micro_batch: int
    ) -> float:
        if not sends or rank == target:
            return end
        link = (rank, target)
        arrival = max(end, self.link_free.get(link, end)) + sends[cut][micro_batch]
        self.link_free[link] = arrival
        return arrival

    def record(self, rank: int, stage: int, kind: Kind, micro_batch: int, end: float) -> None:
        self.orders[rank].append(Action(stage, kind, micro_batch))
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))


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
    """The order of entry whose list schedule ends first.

    Each order is decoded by ``list_schedule``. A move swaps two micro-batches, or takes one to another place.
    """
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


WORTH = 0.01  # of a step: less does not make it change its k


@dataclass(frozen=True)
class Grouping:
    """The k to use, and the makespan of every k that the memory holds."""

    k: int
    makespans: dict[int, float]

    @property
    def modest(self) -> int:
        """The smallest k whose step is within a hundredth of the shortest: larger ones hold more."""
        shortest = min(self.makespans.values())
        return min(k for k, makespan in self.makespans.items() if makespan * (1 - WORTH) <= shortest)


def groupings(micro_batches: int) -> list[int]:
    """Values of k worth a look: the divisors of m, and the powers of two below it, whose last group is smaller."""
    return [k for k in range(1, micro_batches + 1) if micro_batches % k == 0 or k & (k - 1) == 0]


def choose_k(
    times: StageTimes,
    saved: Table,
    limits: Sequence[float],
    *,
    now: int | None = None,
    candidates: Sequence[int] | None = None,
) -> Grouping:
    """The shortest step, of equal ones the smallest k; ``now`` is kept unless another saves a hundredth of it.

    ``times`` with the transfers as last measured, one stage a rank; ``limits`` for what every rank may save.
    Candidates are the divisors of m where none are given. UserError if the memory does not hold even the smallest.

    Ada-Grouper (2303.01675, section 4). Slow links: a larger k sends the next micro-batch of a group while this one
    computes. Every rank then holds k times as many. So k is the one with the shortest step, by the exact evaluation, of
    those that the memory holds.
    """
    stages, count = len(times.forward), len(times.forward[0])
    wanted = sorted(candidates or (k for k in groupings(count) if count % k == 0))
    fitting = [k for k in wanted if overfull(k, saved, limits) is None]
    if not fitting:
        require_held(wanted[0], saved, limits)
    makespans = {k: evaluate(kfkb(stages, count, k), times).makespan for k in fitting}
    best = min(fitting, key=lambda k: (makespans[k], k))
    if now in makespans and makespans[best] > makespans[now] * (1 - WORTH):
        best = now
    return Grouping(best, makespans)


def require_held(k: int, saved: Table, limits: Sequence[float]) -> None:
    """UserError if a rank's memory does not hold kFkB with this k."""
    too_much = overfull(k, saved, limits)
    if too_much is not None:
        rank, needed = too_much
        raise user_error(
            f"groups of {k} micro-batches save {needed:.6g} bytes on rank {rank}, which may hold {limits[rank]:.6g}",
            help="use a smaller k, smaller micro-batches, or recompute more blocks",
        )


def overfull(k: int, saved: Table, limits: Sequence[float]) -> tuple[int, float] | None:
    """The first rank that would hold too much, and what it would hold."""
    most = held(kfkb(len(saved), len(saved[0]), k), saved)
    return next(((rank, needed) for rank, needed in enumerate(most) if needed > limits[rank]), None)
