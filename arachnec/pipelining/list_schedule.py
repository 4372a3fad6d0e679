"""A list schedule: micro-batches enter in a given order, and every rank does the most urgent of what it can.

A gradient that others wait for comes first, of the micro-batch that entered first; then a forward, of the last stage
that has one, if the memory holds it; then a weight gradient, as filling. A forward is only taken where the memory that
is left lets the micro-batches already begun on this rank end, in the order in which they entered (the banker's rule,
Dijkstra 1965). So no order deadlocks that fits alone.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    PipelineSchedule,
)
from arachnec.pipelining.order_problem import OrderProblem

SLACK = 1 + 1e-12  # of a limit: sums of floats


def list_schedule(problem: OrderProblem, entry: Sequence[int], split: bool) -> tuple[float, PipelineSchedule]:
    """Makespan and schedule for micro-batches that enter as in ``entry``; with ``split``, backwards in halves.

    ValueError if a micro-batch does not fit on a rank alone.
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
