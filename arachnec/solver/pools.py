"""Chains on groups of GPUs that are alike: each stretch of a chain on a group of its pool, whole.

A pool is a share of the GPUs in groups of one degree. Chains go through the pools one after another, as through the
machines of a flow shop; in each pool a chain takes the group that is free first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from arachnec.solver.malleable import Chain, Piece


@dataclass(frozen=True)
class Pool:
    """GPUs from ``first`` on, ``groups`` groups of ``degree``, that take the chains' runs from ``begin`` to ``end``.

    ``begin`` and ``end`` are one number a chain: of its runs, the first in this pool and the first behind it.
    """

    first: int
    degree: int
    groups: int
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def ticks(self, number: int, chain: Chain) -> int:
        """Of a chain in this pool."""
        runs = chain.runs[self.begin[number] : self.end[number]]
        return sum(run.steps * run.at(self.degree).ticks for run in runs)

    def holds(self, number: int, chain: Chain) -> bool:
        """Whether every run has a rate on so few GPUs."""
        runs = chain.runs[self.begin[number] : self.end[number]]
        return all(run.rates[0].degree <= self.degree for run in runs)


def in_pools(
    chains: Sequence[Chain], pools: Sequence[Pool], order: Sequence[int], busy: Sequence[int] = ()
) -> list[Piece]:
    """Every chain through the pools, in the first in this order, in the others as they come. ``busy`` is until when
    each GPU is; none are where it is empty."""
    ready = {number: chains[number].release for number in order}
    pieces: list[Piece] = []
    for turn, pool in enumerate(pools):
        firsts = range(pool.first, pool.first + pool.groups * pool.degree, pool.degree)
        free = [(max(busy[first : first + pool.degree], default=0), first) for first in firsts]
        heapq.heapify(free)
        coming = list(order) if turn == 0 else sorted(order, key=lambda number: ready[number])
        for number in coming:
            if pool.begin[number] == pool.end[number]:
                continue
            moment, first = heapq.heappop(free)
            now = max(moment, ready[number])
            for index in range(pool.begin[number], pool.end[number]):
                run = chains[number].runs[index]
                rate = run.at(pool.degree)
                until = now + run.steps * rate.ticks
                pieces.append(Piece(number, index, 0, run.steps, rate.degree, first, now, until))
                now = until
            ready[number] = now
            heapq.heappush(free, (now, first))
    return pieces


def johnson(chains: Sequence[Chain], first: Pool, second: Pool) -> list[int]:
    """Johnson's order of a flow shop of two machines (1954): short before the first, then long before the second."""
    times = [(first.ticks(n, chain), second.ticks(n, chain)) for n, chain in enumerate(chains)]
    early = sorted((n for n, (a, b) in enumerate(times) if a <= b), key=lambda n: times[n][0])
    late = sorted((n for n, (a, b) in enumerate(times) if a > b), key=lambda n: -times[n][1])
    return early + late


def two_pools(
    chains: Sequence[Chain], gpus: int, widths: Sequence[int], borders: Sequence[int]
) -> Iterator[tuple[int, Pool, Pool]]:
    """Every share of the GPUs and degree of each of two pools, with ticks that it takes at least, shortest first.

    ``borders`` are, one a chain, its first run in the second pool.
    """
    zero, ends = (0,) * len(chains), tuple(len(chain.runs) for chain in chains)
    kinds: dict[tuple[Chain, int], list[int]] = {}
    for number, chain in enumerate(chains):
        kinds.setdefault((chain, borders[number]), []).append(number)
    samples = [numbers[0] for numbers in kinds.values()]
    counts = [len(numbers) for numbers in kinds.values()]
    times: dict[tuple[bool, int], list[int] | None] = {}
    for width in widths:
        for later, begin, end in ((False, zero, tuple(borders)), (True, tuple(borders), ends)):
            pool = Pool(0, width, 1, begin, end)
            able = all(pool.holds(number, chains[number]) for number in samples)
            times[later, width] = [pool.ticks(number, chains[number]) for number in samples] if able else None
    options = []
    for share in range(1, gpus):
        for one in (width for width in widths if width <= share):
            for other in (width for width in widths if width <= gpus - share):
                here, there = times[False, one], times[True, other]
                if here is not None and there is not None:
                    groups = share // one, (gpus - share) // other
                    options.append((_at_least(here, there, counts, *groups), share, one, other))
    for least, share, one, other in sorted(options):
        first = Pool(0, one, share // one, zero, tuple(borders))
        yield least, first, Pool(share, other, (gpus - share) // other, tuple(borders), ends)


def _at_least(here: Sequence[int], there: Sequence[int], counts: Sequence[int], first: int, second: int) -> int:
    """Ticks that two pools of so many groups take at least, given those of every kind of chain in each."""
    one = sum(ticks * count for ticks, count in zip(here, counts, strict=True)) / first
    other = sum(ticks * count for ticks, count in zip(there, counts, strict=True)) / second
    longest = max(a + b for a, b in zip(here, there, strict=True))
    return int(max(one + min(there), other + min(here), longest))
