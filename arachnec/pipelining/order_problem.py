"""A pipeline whose order is to be found, and a lower bound on its time in milliseconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from arachnec.pipelining.evaluate import StageTimes, Table, held
from arachnec.pipelining.schedules import one_f_one_b


@dataclass(frozen=True)
class OrderProblem:
    """``saved[stage][micro_batch]`` is held from the forward to the last gradient; ``limits[rank]`` in the same unit.

    ``placement[stage]`` is its rank.
    """

    times: StageTimes
    saved: Table
    limits: Sequence[float]
    placement: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.times.forward)

    @property
    def micro_batches(self) -> int:
        return len(self.times.forward[0])

    @cached_property
    def backward(self) -> Table:
        """The whole backward of every stage and micro-batch."""
        if self.times.backward is not None:
            return self.times.backward
        halves = zip(self.times.activation_gradient, self.times.weight_gradient, strict=True)
        return [[i + w for i, w in zip(*rows, strict=True)] for rows in halves]

    @cached_property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank."""
        return tuple(
            tuple(stage for stage, rank in enumerate(self.placement) if rank == own)
            for own in range(1 + max(self.placement))
        )


def like_1f1b(times: StageTimes, saved: Table) -> OrderProblem:
    """One stage a rank, and no rank may hold more than in 1F1B with the micro-batches as they arrive."""
    stages = len(times.forward)
    arrival = one_f_one_b(stages, len(times.forward[0]))
    return OrderProblem(times, saved, held(arrival, saved), tuple(range(stages)))


PARTS = 12  # the finest division of a limit that is looked at


def lower_bound(problem: OrderProblem, split: bool) -> float:
    """No schedule of this problem ends earlier; ``split`` where each backward may be halved or whole.

    Transfers count with their length, their queues do not.

    Two arguments. A rank runs one action at a time, none before its input can be there, and what follows an action
    follows it (Jackson's preemptive schedule, which is exact for one rank whose actions may be interrupted): so a
    micro-batch also passes all stages there and back. And memory: a forward's bytes are held until its last gradient,
    so bytes times seconds need room below the limit (dual feasible functions, Fekete and Schepers 2001, count clips
    that exclude each other in full).
    """
    chains = _Chains(problem, split)
    return max(
        max(one_rank_bound(chains.actions(hosted)), _memory(problem, chains, rank))
        for rank, hosted in enumerate(problem.hosted)
        if hosted
    )


class _Chains:
    """Heads and tails: the least time before and behind every action."""

    def __init__(self, problem: OrderProblem, split: bool) -> None:
        times, stages, count = problem.times, problem.stages, problem.micro_batches
        self.split = split
        self.forward = times.forward
        self.gradient: Table = problem.backward
        self.weight: Table = [[0] * count] * stages
        if split:
            self.gradient, self.weight = _shorter_way(problem)
        here = [problem.placement[cut] == problem.placement[cut + 1] for cut in range(stages - 1)]
        free: Table = [[0] * count] * stages
        sends, returns = times.send_forward or free, times.send_backward or free
        self.stages = stages
        self.heads: list[list[float]] = [[0] * count]  # before the forward of a stage
        for stage in range(1, stages):
            way: list[float] = [0] * count if here[stage - 1] else list(sends[stage - 1])
            self.heads.append([self.heads[-1][m] + self.forward[stage - 1][m] + way[m] for m in range(count)])
        # behind the gradient of a stage, its own weight gradient included
        self.tails: list[list[float]] = [list(self.weight[0])]
        for stage in range(1, stages):
            way = [0] * count if here[stage - 1] else list(returns[stage - 1])
            further = [way[m] + self.gradient[stage - 1][m] + self.tails[-1][m] for m in range(count)]
            self.tails.append([max(self.weight[stage][m], further[m]) for m in range(count)])
        # from the end of the last forward to the beginning of a stage's gradient
        self.returned: list[list[float]] = [[0] * count]
        for stage in range(stages - 2, -1, -1):
            way = [0] * count if here[stage] else list(returns[stage])
            self.returned.append([self.returned[-1][m] + self.gradient[stage + 1][m] + way[m] for m in range(count)])
        self.returned.reverse()

    def top(self, m: int) -> float:
        """When the first gradient can begin."""
        return self.heads[-1][m] + self.forward[-1][m]

    def behind_top(self, m: int) -> float:
        return max(self.returned[s][m] + self.gradient[s][m] + self.weight[s][m] for s in range(self.stages))

    def whole(self, m: int) -> float:
        return self.top(m) + self.behind_top(m)

    def held(self, stage: int, m: int) -> float:
        """The least time from the beginning of the forward to the end of the last gradient there."""
        ahead = self.top(m) - self.heads[stage][m]
        return ahead + self.returned[stage][m] + self.gradient[stage][m] + self.weight[stage][m]

    def actions(self, hosted: tuple[int, ...]) -> list[tuple[float, float, float]]:
        """Head, length and tail of every action of these stages."""
        actions = []
        for stage in hosted:
            for m, length in enumerate(self.forward[stage]):
                head = self.heads[stage][m]
                actions.append((head, length, self.whole(m) - head - length))
                start = self.top(m) + self.returned[stage][m]
                gradient = self.gradient[stage][m]
                actions.append((start, gradient, self.tails[stage][m]))
                if self.split:
                    actions.append((start + gradient, self.weight[stage][m], 0))
        return actions


def _shorter_way(problem: OrderProblem) -> tuple[Table, Table]:
    """What a halved or a whole backward takes at least until its gradient is there, and behind that: measured, a whole
    one may be shorter than its halves."""
    halves = problem.times.activation_gradient, problem.times.weight_gradient, problem.backward
    rows = [list(zip(*rows, strict=True)) for rows in zip(*halves, strict=True)]
    gradient = [[min(first, whole) for first, _, whole in row] for row in rows]
    weight = [[max(0, min(second, whole - first)) for first, second, whole in row] for row in rows]
    return gradient, weight


def one_rank_bound(actions: list[tuple[float, float, float]]) -> float:
    """No earlier can all end, of (head, length, tail): Jackson's preemptive schedule, the longest tail always first."""
    ordered = sorted(actions)
    now = bound = 0.0
    begun: list[tuple[float, float]] = []  # minus the tail, what is left
    position = 0
    while position < len(ordered) or begun:
        if not begun:
            now = max(now, ordered[position][0])
        while position < len(ordered) and ordered[position][0] <= now:
            heapq.heappush(begun, (-ordered[position][2], ordered[position][1]))
            position += 1
        tail, left = heapq.heappop(begun)
        until = ordered[position][0] if position < len(ordered) else now + left
        if now + left <= until:
            now += left
            bound = max(bound, now - tail)
        else:
            heapq.heappush(begun, (tail, left - (until - now)))
            now = until
    return bound


def _memory(problem: OrderProblem, chains: _Chains, rank: int) -> float:
    limit = problem.limits[rank]
    if limit <= 0:
        return 0
    items = [
        (problem.saved[stage][m], chains.held(stage, m))
        for stage in problem.hosted[rank]
        for m in range(problem.micro_batches)
    ]
    first = min(chains.heads[stage][m] for stage in problem.hosted[rank] for m in range(problem.micro_batches))
    return max(first + sum(share(size) * held for size, held in items) for share in _shares(limit, items))


def _shares(limit: float, items: list[tuple[float, float]]) -> Iterator[Callable[[float], float]]:
    """Functions under which sizes that fit together still sum to at most 1."""
    yield lambda size: size / limit
    sizes = {size for size, _ in items}
    for least in {min(size, limit - size) for size in sizes}:  # none above zero: as the first

        def truncated(size: float, least: float = least) -> float:
            return 1.0 if size > limit - least else size / limit if size >= least else 0.0

        yield truncated
    for parts in range(1, PARTS):

        def rounded(size: float, parts: int = parts) -> float:
            whole, rest = divmod((parts + 1) * size, limit)
            return size / limit if rest == 0 else whole / parts

        yield rounded
