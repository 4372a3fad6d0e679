"""Plans by insertion, for requests that arrive over time or are judged by their latencies.

Orders and prices (``solver.insertion``) come from the bound's one machine: who ends first there, who may be late there,
and how many wait when a request arrives, so that it is narrow where many do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arachnec.ir.sampling import Objective
from arachnec.planning.sampling.chains import RequestChain
from arachnec.planning.sampling.objectives import MEASURED
from arachnec.solver.budget import Clock
from arachnec.solver.insertion import Grid
from arachnec.solver.insertion_search import Measure, improved, inserted_all
from arachnec.solver.latency_bound import Demand, shortest_remaining_first
from arachnec.solver.malleable import Chain, Piece
from arachnec.solver.widths import chains as nested_widths

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
