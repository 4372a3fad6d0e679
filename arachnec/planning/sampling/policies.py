"""Ways to plan sampling, each a function from chains to pieces, and the objectives that they are judged by."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
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
from arachnec.solver.malleable import Batches, Chain, Piece, least_makespan, length, wrapped
from arachnec.solver.pools import Pool, in_pools, johnson, two_pools
from arachnec.solver.problem import TICKS
from arachnec.solver.widths import chains as nested_widths

MOST_POOLS = 400  # pairs of pools that are tried, the most promising first


def whole_pool(chains: Sequence[Chain], gpus: int, degree: int) -> Pool:
    """All GPUs in groups of a degree, for whole chains."""
    ends = tuple(len(chain.runs) for chain in chains)
    return Pool(0, degree, gpus // degree, (0,) * len(chains), ends)


def replica(chains: Sequence[Chain], gpus: int) -> list[Piece] | None:
    """Each rank takes the next request when it is free, as data-parallel serving does."""
    return one_width(chains, gpus, 1)


def one_degree(chains: Sequence[Chain], gpus: int) -> list[Piece] | None:
    """All ranks take one request after another, as Diffusers and xDiT run a list of prompts."""
    return one_width(chains, gpus, gpus)


def one_width(chains: Sequence[Chain], gpus: int, degree: int) -> list[Piece] | None:
    """Groups of one degree that take the requests in order; None where one does not fit them."""
    pool = whole_pool(chains, gpus, degree)
    if not all(pool.holds(n, chain) for n, chain in enumerate(chains)):
        return None
    order = sorted(range(len(chains)), key=lambda n: chains[n].release)
    return in_pools(chains, [pool], order)


def shared_pools(chains: Sequence[Chain], gpus: int, node: int, borders: Sequence[int]) -> list[Piece] | None:
    """A fixed share of the ranks for each model, one degree in each, the best of both by enumeration."""
    best: list[Piece] | None = None
    widths = sorted({width for way in islice(nested_widths(node, gpus), 2) for width in way})
    for least, first, second in islice(two_pools(chains, gpus, widths, borders), MOST_POOLS):
        if best is not None and least >= length(best):
            break
        for order in (johnson(chains, first, second), sorted(range(len(chains)), key=lambda n: chains[n].release)):
            pieces = in_pools(chains, [first, second], order)
            if best is None or length(pieces) < length(best):
                best = pieces
    return best


def coding_apart(
    chains: Sequence[Chain],
    gpus: int,
    node: int,
    bound: int,
    parts: Sequence[tuple[int, int]],
    share: int,
    others: Callable[[Sequence[Chain], int], Iterator[list[Piece]]],
) -> Iterator[list[Piece]]:
    """Encoders and decoders on the last ``share`` GPUs, one GPU each, and the models on all others.

    ``parts`` are, one a chain, the first run of a model and the first run behind the models. ``others`` gives further
    plans of the models on so many GPUs.
    """
    left = gpus - share
    models = [Chain(chain.runs[begin:end], chain.release) for chain, (begin, end) in zip(chains, parts, strict=True)]
    plans = [*others(models, left), *in_order_of_length(models, left, node)]
    if not any(chain.release for chain in chains):
        least = max(bound, least_makespan(models, left))
        plans += wrap_arounds(models, left, node, least)
        apart = side_by_side(models, left, node, least)
        plans += [] if apart is None else [apart]
    for pieces in plans:
        yield _coded(chains, parts, pieces, range(left, gpus))


def _coded(
    chains: Sequence[Chain], parts: Sequence[tuple[int, int]], pieces: Sequence[Piece], coding: Sequence[int]
) -> list[Piece]:
    """The models' pieces as early as their captions are encoded; encoders in the order in which these are needed,
    decoders as latents come, between encoders of requests that come later."""
    taken: dict[int, list[tuple[int, int]]] = {gpu: [] for gpu in coding}
    ready, busy = [chain.release for chain in chains], [0] * coding[0]
    timed: list[Piece] = []

    def code(number: int, runs: range) -> None:
        if not runs:
            return
        ticks = sum(chains[number].runs[index].steps * chains[number].runs[index].at(1).ticks for index in runs)
        now, gpu = min((_gap(spans, ready[number], ticks), gpu) for gpu, spans in taken.items())
        insort(taken[gpu], (now, now + ticks))
        for index in runs:
            run = chains[number].runs[index]
            until = now + run.steps * run.at(1).ticks
            timed.append(Piece(number, index, 0, run.steps, 1, gpu, now, until))
            now = until
        ready[number] = now

    begins = {piece.chain: piece.start for piece in sorted(pieces, key=lambda piece: -piece.start)}
    for number in sorted(range(len(chains)), key=lambda n: begins[n]):
        code(number, range(parts[number][0]))
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.end, piece.chain, piece.run, piece.begin)):
        gpus = range(piece.first, piece.first + piece.degree)
        now = max(ready[piece.chain], max(busy[gpu] for gpu in gpus))
        until = ready[piece.chain] = now + piece.end - piece.start
        for gpu in gpus:
            busy[gpu] = until
        timed.append(replace(piece, run=piece.run + parts[piece.chain][0], start=now, end=until))
    for number in sorted(range(len(chains)), key=lambda n: ready[n]):
        code(number, range(parts[number][1], len(chains[number].runs)))
    return timed


def _gap(spans: Sequence[tuple[int, int]], ready: int, ticks: int) -> int:
    """From when on so many ticks are free, between disjoint spans in order."""
    now = ready
    for start, end in spans[bisect_right(spans, ready, key=itemgetter(1)) :]:
        if start - now >= ticks:
            break
        now = max(now, end)
    return now


def in_order_of_length(
    chains: Sequence[Chain], gpus: int, node: int, busy: Sequence[int] = ()
) -> Iterator[list[Piece]]:
    """One degree for all, longest requests first, for every width. ``busy`` is until when each GPU is."""
    for width in next(nested_widths(node, gpus)):
        pool = whole_pool(chains, gpus, width)
        if all(pool.holds(n, chain) for n, chain in enumerate(chains)):
            for order in orders(chains, pool):
                yield in_pools(chains, [pool], order, busy)


def orders(chains: Sequence[Chain], pool: Pool) -> Iterator[list[int]]:
    """Longest first, shortest first, and as they arrive."""
    numbers = range(len(chains))
    yield sorted(numbers, key=lambda n: -pool.ticks(n, chains[n]))
    yield sorted(numbers, key=lambda n: (chains[n].release, pool.ticks(n, chains[n])))
    yield sorted(numbers, key=lambda n: chains[n].release)


def side_by_side(chains: Sequence[Chain], gpus: int, node: int, bound: int) -> list[Piece] | None:
    """Every chain from the start on ranks of its own, as many as end it by a horizon; the least of these that fits.

    Any degree will do, so that few requests on many ranks share them by their work. None for more chains than ranks.
    """
    if len(chains) > gpus:
        return None
    kinds = {
        chain: sorted({rate.degree for run in chain.runs for rate in run.rates if rate.degree >= chain.narrowest})
        for chain in set(chains)
    }
    below, best = bound - 1, None
    high = max((chain.ticks_at(1) for chain in kinds), default=0)
    while below + 1 + bound // 1000 < high:
        horizon = (below + high) // 2
        widths = {chain: next((w for w in able if chain.ticks_at(w) <= horizon), None) for chain, able in kinds.items()}
        firsts = None if None in widths.values() else _rows([widths[chain] or 1 for chain in chains], gpus, node)
        if firsts is None:
            below = horizon
        else:
            best, high = (firsts, dict(widths)), horizon
    if best is None:
        return None
    pieces: list[Piece] = []
    for number, (chain, first) in enumerate(zip(chains, best[0], strict=True)):
        pool = Pool(first, best[1][chain] or 1, 1, (0,) * len(chains), tuple(len(c.runs) for c in chains))
        pieces += in_pools(chains, [pool], [number])
    return pieces


def _rows(widths: Sequence[int], gpus: int, node: int) -> list[int] | None:
    """The first rank of a group of each width, none on more nodes than it needs; None where they do not fit."""
    free = [(start, min(node, gpus - start)) for start in range(0, gpus, node)]  # of every node its last ranks
    firsts = [0] * len(widths)
    for number in sorted(range(len(widths)), key=lambda n: -widths[n]):
        width = widths[number]
        if width > node:
            count = -(-width // node)
            whole = next(
                (k for k in range(len(free) - count + 1) if all(size == node for _, size in free[k : k + count])), None
            )
            if whole is None:
                return None
            firsts[number] = free[whole][0]
            left = count * node - width
            for k in range(whole, whole + count):
                free[k] = (free[k][0] + node, 0)
            free[whole + count - 1] = (firsts[number] + width, left)
            continue
        able = [k for k, (_, size) in enumerate(free) if size >= width]
        if not able:
            return None
        tightest = min(able, key=lambda k: free[k][1])
        start, size = free[tightest]
        firsts[number], free[tightest] = start, (start + width, size - width)
    return firsts


def wrap_arounds(chains: Sequence[Chain], gpus: int, node: int, bound: int) -> Iterator[list[Piece]]:
    """Wrap-around schedules over the widths whose blocks nest."""
    for widths in islice(nested_widths(node, gpus), 2):
        pieces = wrapped(chains, gpus, widths, bound)
        if pieces is not None:
            yield pieces


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
    """Every order at every price, the first ones whatever the clock says.

    Orders and prices (``solver.insertion``) come from the bound's one machine: which request ends first there, which
    may be late there, and how many wait when a request arrives, so that it is narrow where many do.
    """
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
