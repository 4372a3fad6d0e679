"""Ways to plan sampling, each a function from chains to pieces: the search, and what others do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from arachnec.solver.malleable import Chain, Piece, length, wrapped
from arachnec.solver.pools import Pool, in_pools, johnson, two_pools
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


def in_order_of_length(chains: Sequence[Chain], gpus: int, node: int) -> Iterator[list[Piece]]:
    """One degree for all, longest requests first, for every width."""
    for width in next(nested_widths(node, gpus)):
        pool = whole_pool(chains, gpus, width)
        if all(pool.holds(n, chain) for n, chain in enumerate(chains)):
            for order in orders(chains, pool):
                yield in_pools(chains, [pool], order)


def orders(chains: Sequence[Chain], pool: Pool) -> Iterator[list[int]]:
    """Longest first, shortest first, and as they arrive."""
    numbers = range(len(chains))
    yield sorted(numbers, key=lambda n: -pool.ticks(n, chains[n]))
    yield sorted(numbers, key=lambda n: (chains[n].release, pool.ticks(n, chains[n])))
    yield sorted(numbers, key=lambda n: chains[n].release)


def wrap_arounds(chains: Sequence[Chain], gpus: int, node: int, bound: int) -> Iterator[list[Piece]]:
    """Wrap-around schedules over the widths whose blocks nest."""
    for widths in islice(nested_widths(node, gpus), 2):
        pieces = wrapped(chains, gpus, widths, bound)
        if pieces is not None:
            yield pieces
