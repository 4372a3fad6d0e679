"""The groups of ranks that a cascade on a grid of Ulysses x ring communicates in. No torch: planners ask as well."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=8192)
def subgroups(ranks: tuple[int, ...], ulysses: int, ring: int) -> tuple[tuple[int, ...], ...]:
    """All ranks, then runs of ``ulysses`` that exchange heads, then every ``ulysses``-th rank, which form a ring.

    Each once, the single ranks left out.
    """
    rows = (ranks[first : first + ulysses] for first in range(0, len(ranks), ulysses))
    columns = (ranks[column::ulysses] for column in range(ulysses))
    return tuple(group for group in dict.fromkeys((ranks, *rows, *columns)) if len(group) > 1)
