"""What the search needs of each objective: a bound, a plan's value, orders of insertion; and plans by insertion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from arachnec.ir.sampling import PART, Objective, mean, percentile
from arachnec.planning.sampling.chains import RequestChain
from arachnec.solver.budget import Clock
from arachnec.solver.insertion import Grid
from arachnec.solver.insertion_search import Measure, improved, inserted_all
from arachnec.solver.latency_bound import (
    Demand,
    least_mean_latency,
    least_percentile,
    on_time,
    shortest_remaining_first,
)
from arachnec.solver.malleable import Batches, Chain, Piece, least_makespan
from arachnec.solver.problem import TICKS
from arachnec.solver.widths import chains as nested_widths

NEAR = 1e-3  # above the bound, where it is decided who may be late


class Measured(Protocol):
    """One objective. Times are ticks; ``wanted`` are demands, one for each chain."""

    def bound(
        self, requests: Sequence[RequestChain], arrivals: Mapping[int, float], batches: Batches, gpus: int
    ) -> float:
        """No plan is below it. ``arrivals`` are ms by request."""

    def value(self, last: float, latencies: Sequence[float]) -> tuple[float, float]:
        """Of a plan's last end and every request's latency; then what to prefer where that is equal."""

    def orders(self, wanted: Sequence[Demand], gpus: int) -> list[list[int]]:
        """In which the chains, by their numbers, are inserted."""


@dataclass(frozen=True)
class Makespan:
    def bound(
        self, requests: Sequence[RequestChain], arrivals: Mapping[int, float], batches: Batches, gpus: int
    ) -> float:
        return float(least_makespan([request.chain for request in requests], gpus, batches))

    def value(self, last: float, latencies: Sequence[float]) -> tuple[float, float]:
        return last, mean(latencies)

    def orders(self, wanted: Sequence[Demand], gpus: int) -> list[list[int]]:
        return [_ordered([one.release for one in wanted]), _ordered([-one.work for one in wanted])]


@dataclass(frozen=True)
class MeanLatency:
    def bound(
        self, requests: Sequence[RequestChain], arrivals: Mapping[int, float], batches: Batches, gpus: int
    ) -> float:
        return least_mean_latency(demands(requests, arrivals, batches), gpus)

    def value(self, last: float, latencies: Sequence[float]) -> tuple[float, float]:
        return mean(latencies), 0.0

    def orders(self, wanted: Sequence[Demand], gpus: int) -> list[list[int]]:
        return [_ordered(shortest_remaining_first(wanted, gpus)), _ordered([one.work for one in wanted])]


@dataclass(frozen=True)
class PercentileLatency:
    def bound(
        self, requests: Sequence[RequestChain], arrivals: Mapping[int, float], batches: Batches, gpus: int
    ) -> float:
        wanted = demands(requests, arrivals, batches)
        return least_percentile(wanted, gpus, _may_be_late(len(wanted)))

    def value(self, last: float, latencies: Sequence[float]) -> tuple[float, float]:
        least = percentile(latencies)
        return least, math.fsum(latency**2 for latency in latencies if latency <= least)

    def orders(self, wanted: Sequence[Demand], gpus: int) -> list[list[int]]:
        late = _may_be_late(len(wanted))
        limit = least_percentile(wanted, gpus, late) * (1 + NEAR) + 1
        kept = set(on_time(wanted, gpus, limit, late) or range(len(wanted)))
        return [sorted(range(len(wanted)), key=lambda n: (n not in kept, wanted[n].release))]


MEASURED: Mapping[Objective, Measured] = {
    "makespan": Makespan(),
    "mean-latency": MeanLatency(),
    "p95-latency": PercentileLatency(),
}


def demands(requests: Sequence[RequestChain], arrivals: Mapping[int, float], batches: Batches) -> list[Demand]:
    """Of every request, whichever of the ``batches`` it is in; ``arrivals`` are ms."""
    return [
        Demand(arrivals[clip] * TICKS, ((len(one.requests), one.chain), *batches.get(one.chain, ())))
        for one in requests
        for clip in one.requests
    ]


def measure(requests: Sequence[RequestChain], objective: Objective) -> Measure:
    """Of ends in ticks: the objective, and what to prefer where that is equal."""
    releases = [one.chain.release for one in requests for _ in one.requests]
    counts = [len(one.requests) for one in requests]
    value = MEASURED[objective].value

    def of_ends(ends: Sequence[int]) -> tuple[float, float]:
        request_ends = (end for end, count in zip(ends, counts, strict=True) for _ in range(count))
        latencies = [float(end - release) for end, release in zip(request_ends, releases, strict=True)]
        return value(float(max(ends, default=0)), latencies)

    return of_ends


def _ordered(keys: Sequence[float]) -> list[int]:
    return sorted(range(len(keys)), key=lambda n: keys[n])


def _may_be_late(requests: int) -> int:
    """How many may take longer than the percentile."""
    return requests - math.ceil(PART * requests)


PRICES = (2.0, 1.0, 4.0)  # of a GPU tick, in ticks of the request's own end times all GPUs


def insertion_plans(
    chains: Sequence[Chain], gpus: int, node: int, objective: Objective, clock: Clock
) -> Iterator[list[Piece]]:
    """Every order at every price, the first ones whatever the clock says."""
    grid = Grid(gpus, next(nested_widths(node, gpus)))
    wanted = [Demand(chain.release, ((1, chain),)) for chain in chains]
    ends = shortest_remaining_first(wanted, gpus)
    waiting = [
        float(sum(other.release <= chain.release < end for other, end in zip(chains, ends, strict=True)))
        for chain in chains
    ]
    orders = MEASURED[objective].orders(wanted, gpus)
    for number, prices in enumerate((waiting, *([price] * len(chains) for price in PRICES))):
        for order in orders:
            if number == 0 or clock.any_left():
                yield inserted_all(chains, grid, order, prices, clock)


def improved_pieces(
    requests: Sequence[RequestChain],
    pieces: Sequence[Piece],
    gpus: int,
    node: int,
    wanted: Measure,
    clock: Clock,
    seed: int,
) -> list[Piece]:
    """A plan that is preferred, or the same."""
    grid = Grid(gpus, next(nested_widths(node, gpus)))
    chains = [request.chain for request in requests]
    return improved(chains, grid, pieces, wanted, clock, seed)
