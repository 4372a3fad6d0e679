"""Requests that arrive over time, or are judged by their latencies: the objective's bound, and plans by insertion.

Orders and prices (``solver.insertion``) come from the bound's one machine: who ends first there, who may be late there,
and how many wait when a request arrives, so that it is narrow where many do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from arachnec.ir.latency import PART, Objective, mean, percentile
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
from arachnec.solver.malleable import Chain, Piece
from arachnec.solver.problem import TICKS
from arachnec.solver.widths import chains as nested_widths

PRICES = (2.0, 1.0, 4.0)  # of a GPU tick, in ticks of the request's own end times all GPUs
NEAR = 1e-3  # above the bound, where it is decided who may be late


def demands(
    requests: Sequence[RequestChain],
    arrivals: Mapping[int, float],
    batches: Mapping[Chain, Sequence[tuple[int, Chain]]] | None = None,
) -> list[Demand]:
    """Of every request, whichever of the ``batches`` it is in; ``arrivals`` are ms."""
    return [
        Demand(arrivals[clip] * TICKS, ((len(one.requests), one.chain), *(batches or {}).get(one.chain, ())))
        for one in requests
        for clip in one.requests
    ]


def latency_bound(wanted: Sequence[Demand], gpus: int, objective: Objective) -> float:
    """Ticks below which no plan comes."""
    if objective == "mean-latency":
        return least_mean_latency(wanted, gpus)
    return least_percentile(wanted, gpus, may_be_late(len(wanted)))


def may_be_late(requests: int) -> int:
    """How many may take longer than the percentile."""
    return requests - math.ceil(PART * requests)


def measure(requests: Sequence[RequestChain], objective: Objective) -> Measure:
    """Of ends in ticks: the objective, and what to prefer where that is equal."""
    releases = [(request.chain.release, len(request.requests)) for request in requests]

    def value(ends: Sequence[int]) -> tuple[float, float]:
        latencies = [
            float(end - release) for end, (release, count) in zip(ends, releases, strict=True) for _ in range(count)
        ]
        if objective == "makespan":
            return float(max(ends, default=0)), mean(latencies)
        if objective == "mean-latency":
            return mean(latencies), 0.0
        least = percentile(latencies)
        return least, math.fsum(latency**2 for latency in latencies if latency <= least)

    return value


def insertion_plans(
    requests: Sequence[RequestChain], gpus: int, node: int, objective: Objective, clock: Clock
) -> Iterator[list[Piece]]:
    """Every order at every price, the first ones whatever the clock says."""
    chains = [request.chain for request in requests]
    grid = Grid(gpus, next(nested_widths(node, gpus)))
    wanted = [Demand(chain.release, ((1, chain),)) for chain in chains]
    ends = shortest_remaining_first(wanted, gpus)
    numbers = range(len(chains))
    waiting = [
        float(sum(other.release <= chain.release < end for other, end in zip(chains, ends, strict=True)))
        for chain in chains
    ]
    if objective == "mean-latency":
        orders = [sorted(numbers, key=lambda n: ends[n]), sorted(numbers, key=lambda n: wanted[n].work)]
    elif objective == "p95-latency":
        late = may_be_late(len(chains))
        limit = least_percentile(wanted, gpus, late) * (1 + NEAR) + 1
        kept = set(on_time(wanted, gpus, limit, late) or numbers)
        orders = [sorted(numbers, key=lambda n: (n not in kept, chains[n].release))]
    else:
        orders = [
            sorted(numbers, key=lambda n: chains[n].release),
            sorted(numbers, key=lambda n: -wanted[n].work),
        ]
    for number, prices in enumerate((waiting, *([price] * len(chains) for price in PRICES))):
        for order in orders:
            if number == 0 or clock.any_left():
                yield inserted_all(chains, grid, order, prices, clock)


def improved_pieces(
    requests: Sequence[RequestChain],
    pieces: Sequence[Piece],
    gpus: int,
    node: int,
    objective: Objective,
    clock: Clock,
    seed: int,
) -> list[Piece]:
    """A plan that the objective prefers, or the same."""
    grid = Grid(gpus, next(nested_widths(node, gpus)))
    return improved([request.chain for request in requests], grid, pieces, measure(requests, objective), clock, seed)
