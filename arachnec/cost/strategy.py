"""How the ranks of a cascade do its work together, once their number is known.

A further way to do it (a sparse density) is a further field here: the
cost table then has a row for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """How the ranks of a clip share its attention: ``degree = ulysses * ring``."""

    ulysses: int
    ring: int


@dataclass(frozen=True)
class Strategy:
    """``attention`` None asks for the cheapest product of Ulysses and ring on the ranks at hand, ``side`` None for the
    cheapest number of clips side by side. ``recompute`` blocks run again in the backward."""

    attention: Attention | None = None
    recompute: int = 0
    side: int | None = None


CHEAPEST = Strategy()


def grid_of(degree: int, ulysses: int | None, ring: int | None) -> Attention | None:
    """The product of Ulysses and ring that is asked for by one factor or both; None where neither is given.

    Raises ValueError where no such product is the degree.
    """
    if ulysses is None and ring is None:
        return None
    all_to_all = ulysses if ulysses is not None else degree // max(1, ring or 1)
    around = ring if ring is not None else degree // max(1, all_to_all)
    if all_to_all < 1 or around < 1 or all_to_all * around != degree:
        raise ValueError(f"ulysses {all_to_all} times ring {around} is not degree {degree}")
    return Attention(all_to_all, around)
