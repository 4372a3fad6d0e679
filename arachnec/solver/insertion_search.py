"""A large neighbourhood search over schedules of insertion: some chains leave their GPUs and are inserted again.

Those that leave are alive at one time, and come back in another order and at other prices. What is no worse is kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from arachnec.solver.budget import Clock
from arachnec.solver.insertion import Grid, Taken, inserted
from arachnec.solver.malleable import Chain, Piece

PRICES = (0.0, 1.0, 2.0, 4.0, 8.0)  # of a GPU tick, in ticks of the chain's own end times all GPUs
VISIT = 8  # operations that a stretch of taken time takes to be looked at
CHAINS = 8  # chains that leave at once
Measure: TypeAlias = Callable[[Sequence[int]], tuple[float, float]]  # of the ends of all chains, what is to be least


def inserted_all(
    chains: Sequence[Chain], grid: Grid, order: Sequence[int], prices: Sequence[float], clock: Clock
) -> list[Piece]:
    """All chains in an order, each at its price."""
    taken = Taken(grid)
    pieces = [piece for number in order for piece in inserted(number, chains[number], grid, taken, prices[number])]
    clock.count(VISIT * taken.visits)
    return pieces


def improved(
    chains: Sequence[Chain], grid: Grid, pieces: Sequence[Piece], measure: Measure, clock: Clock, seed: int
) -> list[Piece]:
    """A schedule that the measure prefers, or the same; some of the chains leave for as long as the clock allows."""
    rng = random.Random(seed)
    own: list[list[Piece]] = [[] for _ in chains]
    for piece in pieces:
        own[piece.chain].append(piece)
    ends = [max((piece.end for piece in parts), default=0) for parts in own]
    least = measure(ends)
    while clock.any_left() and chains:
        leaving = _leaving(chains, ends, rng)
        kept = [piece for number, parts in enumerate(own) if number not in leaving for piece in parts]
        taken = Taken(grid, kept)
        one = rng.choice((*PRICES, None))  # for all of them, or a price for each
        parts = {
            number: inserted(number, chains[number], grid, taken, rng.choice(PRICES) if one is None else one)
            for number in _order(chains, leaving, rng)
        }
        clock.count(VISIT * (taken.visits + len(kept)))
        tried = list(ends)
        for number, new in parts.items():
            tried[number] = max(piece.end for piece in new)
        value = measure(tried)
        if value <= least:
            least, ends = value, tried
            for number, new in parts.items():
                own[number] = new
    return [piece for parts in own for piece in parts]


def _leaving(chains: Sequence[Chain], ends: Sequence[int], rng: random.Random) -> list[int]:
    """A chain, more often one that takes long, and some that are alive when it is."""
    pair = rng.randrange(len(chains)), rng.randrange(len(chains))
    first = max(pair, key=lambda n: ends[n] - chains[n].release)
    moment = rng.randint(chains[first].release, max(ends[first], chains[first].release))
    alive = [n for n, chain in enumerate(chains) if n != first and chain.release <= moment <= ends[n]]
    return [first, *rng.sample(alive, min(len(alive), rng.randrange(CHAINS)))]


def _order(chains: Sequence[Chain], leaving: Sequence[int], rng: random.Random) -> list[int]:
    keys: list[Callable[[int], float]] = [
        lambda n: chains[n].frontier[0][1],
        lambda n: chains[n].release,
        lambda n: -chains[n].frontier[0][1],
        lambda n: rng.random(),
    ]
    return sorted(leaving, key=rng.choice(keys))
