"""How the ranks of a cascade do its work together, once their number is known.

A further way to do it (clips side by side, only some blocks recomputed, a sparse density) is a further field here: the
cost table then has a row for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """How the ranks of a cascade share its attention: ``degree = ulysses * ring``."""

    ulysses: int
    ring: int


@dataclass(frozen=True)
class Strategy:
    """``attention`` None asks for the cheapest product of Ulysses and ring on the ranks at hand."""

    attention: Attention | None = None
    recompute: bool = False


CHEAPEST = Strategy()
CHEAPEST_RECOMPUTING = Strategy(recompute=True)


def grid_of(degree: int, ulysses: int | None, ring: int | None) -> Attention | None:
    """The product of Ulysses and ring that is asked for by one factor or both; None where neither is given.

    Raises ValueError where no such product is the degree.
    """
    if ulysses is None and ring is None:
        return None
    one = ulysses if ulysses is not None else degree // max(1, ring or 1)
    other = ring if ring is not None else degree // max(1, one)
    if one < 1 or other < 1 or one * other != degree:
        raise ValueError(f"ulysses {one} times ring {other} is not degree {degree}")
    return Attention(one, other)
