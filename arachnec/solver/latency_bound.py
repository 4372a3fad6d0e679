"""Bounds of the mean latency and of a percentile of it, for chains that arrive over time.

Both take all GPUs for one machine that is m times as fast as one GPU, may interrupt, and shares its time freely. Of a
request it does only the least work that its chain needs, over all degrees. Every schedule, cut down to that work, is
one of this machine's, with no end later. So what is best there is a bound.

* *Mean.* How many requests can have ended by T? Each that has needs its least work within T minus its arrival. Shortest
  remaining work first has at every moment the fewest unfinished (Schrage 1968), so it has the most ended by T. Where
  that is fewer than k, the k-th end of every schedule lies behind T. The bound is the mean over k of the largest T that
  was seen to be too early.
* *Mean, again.* The mean moment of a request's work lies before its end by at least half of its fastest time (counted
  step by step where steps differ). The sum of the mean moments is least where the available request of least whole work
  goes first (Goemans et al. 2002). This one is the larger where many requests run side by side.
* *Percentile.* Is there a schedule in which all but q requests have a latency of at most L? Each of the others has its
  work done between its arrival and L later, and that is its least work within L ticks. Deadlines are in the order of
  arrivals, so first come first served keeps them wherever anything does. Of the ways to leave out c of the first
  requests only the one that ends first matters, which is a table over requests and c. The least L that is possible is
  the bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from arachnec.solver.malleable import Chain

STEP, HALVINGS = 1 / 64, 5  # of the longest request's fastest time; a bound is sought in such steps, then halves
ROUNDING = 1e-9  # of a bound, that floats may have added


@dataclass(frozen=True)
class Demand:
    """A request that arrives at ``release`` ticks; ``ways`` are chains, each of so many equal requests together."""

    release: float
    ways: tuple[tuple[int, Chain], ...]

    @cached_property
    def shortest(self) -> int:
        """Ticks from its arrival at least."""
        return min(chain.shortest for _, chain in self.ways)

    @cached_property
    def work(self) -> float:
        """GPU ticks at least."""
        return self.work_within(math.inf)

    @cached_property
    def behind(self) -> float:
        """Ticks from the mean moment of its least work to its end, at least."""
        return min(_behind(chain) for _, chain in self.ways)

    def work_within(self, ticks: float) -> float:
        """GPU ticks at least, where it ends within so many; infinite where it cannot."""
        return min(chain.least_area(ticks) / size for size, chain in self.ways)


def _behind(chain: Chain) -> float:
    total = chain.least_area(math.inf)
    after = weighted = 0.0
    for run in reversed(chain.runs):
        ticks = run.steps * run.rates[-1].ticks
        weighted += run.steps * run.hull[0].area * (after + ticks / 2)
        after += ticks
    return weighted / total if total > 0 else 0.0


def least_mean_latency(demands: Sequence[Demand], gpus: int) -> float:
    """Ticks below which the mean latency of no schedule lies; 0 without requests."""
    if not demands:
        return 0.0
    arrived = math.fsum(demand.release for demand in demands)
    ends = _least_ends(demands, gpus)
    other = math.fsum(_mean_moments(demands, gpus)) + math.fsum(demand.behind for demand in demands)
    return max(0.0, (max(math.fsum(ends), other) - arrived) / len(demands) - ROUNDING * max(ends))


def _least_ends(demands: Sequence[Demand], gpus: int) -> list[float]:
    """The k-th end at least, for every k."""
    first = sorted(demand.release + demand.shortest for demand in demands)
    least = list(map(max, sorted(shortest_remaining_first(demands, gpus)), first))
    shortest = max(1, max(demand.shortest for demand in demands))
    for number, low in enumerate(least):
        if _ended(demands, gpus, low) > number:
            continue
        step = STEP * shortest
        while _ended(demands, gpus, low + step) <= number:
            low, step = low + step, 2 * step
        for _ in range(HALVINGS):
            step /= 2
            low += step if _ended(demands, gpus, low + step) <= number else 0.0
        least[number] = low
    return least


def _ended(demands: Sequence[Demand], gpus: int, moment: float) -> int:
    """How many requests can have ended by a moment."""
    within = [demand for demand in demands if demand.release + demand.shortest <= moment]
    works = [demand.work_within(moment - demand.release) for demand in within]
    return sum(end <= moment * (1 + ROUNDING) for end in _ends([d.release for d in within], works, gpus))


def shortest_remaining_first(demands: Sequence[Demand], gpus: int) -> list[float]:
    """Ticks at which each request ends on the one machine, the one with least work left first."""
    return _ends([demand.release for demand in demands], [demand.work for demand in demands], gpus)


def _ends(releases: Sequence[float], works: Sequence[float], gpus: int) -> list[float]:
    ends = [0.0] * len(works)
    waiting: list[tuple[float, int]] = []
    for number, now, until in _arrivals(releases):
        heapq.heappush(waiting, (works[number] / gpus, number))
        while waiting and now < until:
            left, doing = heapq.heappop(waiting)
            if now + left > until:
                heapq.heappush(waiting, (left - (until - now), doing))
                break
            now += left
            ends[doing] = now
    return ends


def _arrivals(releases: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """Requests as they arrive, each with its arrival and the next one's."""
    coming = sorted((release, number) for number, release in enumerate(releases))
    for (release, number), (until, _) in pairwise([*coming, (math.inf, 0)]):
        yield number, release, until


def _mean_moments(demands: Sequence[Demand], gpus: int) -> list[float]:
    """The mean moment of each request's work on the one machine, the one of least whole work first."""
    moments = [demand.release if demand.work == 0 else 0.0 for demand in demands]
    waiting: list[tuple[float, int, float]] = []
    for number, now, until in _arrivals([demand.release for demand in demands]):
        if demands[number].work > 0:
            heapq.heappush(waiting, (demands[number].work, number, demands[number].work / gpus))
        while waiting and now < until:
            work, doing, left = heapq.heappop(waiting)
            taken = min(left, until - now)
            moments[doing] += (now + taken / 2) * taken * gpus / work
            now += taken
            if left > taken:
                heapq.heappush(waiting, (work, doing, left - taken))
    return moments


def least_percentile(demands: Sequence[Demand], gpus: int, late: int) -> float:
    """Ticks of latency that more than ``late`` requests exceed, or reach, in every schedule; 0 where all may be late.

    The latency of rank n - ``late``, the least first, is not below it.
    """
    if late >= len(demands):
        return 0.0
    low, high = 0.0, float(sorted(demand.shortest for demand in demands)[len(demands) - late - 1])
    if on_time(demands, gpus, high, late) is not None:
        return high * (1 - ROUNDING)
    while on_time(demands, gpus, high, late) is None:
        low, high = high, 2 * high
    while high - low > max(0.5, ROUNDING * high):
        middle = (low + high) / 2
        low, high = (low, middle) if on_time(demands, gpus, middle, late) is not None else (middle, high)
    return low * (1 - ROUNDING)


def on_time(demands: Sequence[Demand], gpus: int, latency: float, late: int) -> list[int] | None:
    """Requests that end within so many ticks of their arrival on the one machine, all but ``late``; None where fewer
    do."""
    coming = sorted(range(len(demands)), key=lambda n: demands[n].release)
    ends = [0.0]  # by how many were left out
    kept: list[list[bool]] = []
    for number in coming:
        demand = demands[number]
        ticks = demand.work_within(latency) / gpus
        limit = demand.release + latency
        following: list[float] = []
        takes: list[bool] = []
        for out in range(min(late, len(ends)) + 1):
            end = max(ends[out], demand.release) + ticks if out < len(ends) else math.inf
            end = end if end <= limit * (1 + ROUNDING) else math.inf
            left_out = ends[out - 1] if out > 0 else math.inf
            takes.append(end <= left_out)
            following.append(min(end, left_out))
        ends = following
        kept.append(takes)
    best = min(range(len(ends)), key=lambda out: ends[out])
    if ends[best] == math.inf:
        return None
    chosen = []
    for number, takes in zip(reversed(coming), reversed(kept), strict=True):
        if takes[best]:
            chosen.append(number)
        else:
            best -= 1
    return chosen[::-1]
