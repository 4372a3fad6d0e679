"""How the ranks of a cascade do its work together, once their number is known.

A further way to do it (a sparse density) is a further field here: the
cost table then has a row for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.nodes import Cascade


@dataclass(frozen=True)
class Attention:
    """How the ranks of a clip share its attention: ``degree = ulysses * ring``."""

    ulysses: int
    ring: int


@dataclass(frozen=True)
class Strategy:
    """``attention`` None asks for the cheapest product of Ulysses and ring on the ranks at hand, ``side`` None for the
    cheapest number of clips side by side. ``recompute`` blocks run again in the backward. ``unconditional`` is how the
    last ranks share the second branch of a denoise, where they are not as many as those of the first."""

    attention: Attention | None = None
    recompute: int = 0
    side: int | None = None
    unconditional: Attention | None = None

    @property
    def sides(self) -> int:
        """How many clips or branches lie side by side; one where nothing says so yet."""
        return self.side or 1


CHEAPEST = Strategy()


def grid_of(degree: int, ulysses: int | None, ring: int | None) -> Attention | None:
    """The product of Ulysses and ring that is asked for by one factor or both; None where neither is given.

    Raises ValueError where no such product is the degree.
    """
    if ulysses is None:
        if ring is None:
            return None
        ulysses = degree // max(1, ring)
    if ring is None:
        ring = degree // max(1, ulysses)
    if ulysses < 1 or ulysses * ring != degree:
        raise ValueError(f"ulysses {ulysses} times ring {ring} is not degree {degree}")
    return Attention(ulysses, ring)


def first_ranks(strategy: Strategy, width: int) -> int:
    """How many of ``width`` ranks the first clip or branch has."""
    other = strategy.unconditional
    return width // strategy.sides if other is None else width - other.ulysses * other.ring


def even_ranks(strategy: Strategy, width: int) -> int:
    """How many ranks it would be if every side had as few as the one that has fewest."""
    first = first_ranks(strategy, width)
    return width if strategy.unconditional is None else 2 * min(first, width - first)


def strategy_of(cascade: Cascade, recompute: int = 0) -> Strategy:
    """How a placed cascade's ranks do its work, as it says; the cheapest attention where it does not."""
    ulysses, ring = cascade.attrs.get("ulysses"), cascade.attrs.get("ring")
    known = [value if isinstance(value, int) else None for value in (ulysses, ring)]
    return _strategy(cascade, recompute, grid_of(cascade.degree, *known))


def sides_of(cascade: Cascade, recompute: int = 0) -> Strategy:
    """The same with the cheapest attention, whatever product of Ulysses and ring the cascade says."""
    return _strategy(cascade, recompute, None)


def _strategy(cascade: Cascade, recompute: int, attention: Attention | None) -> Strategy:
    other = cascade.unconditional
    return Strategy(attention, recompute, cascade.side, None if other is None else Attention(*other))


def widest_ulysses(degree: int, heads: int) -> Attention:
    """As much Ulysses as there are heads for, and the rest as a ring: what steps of sampling are profiled with. 0 heads
    are any number."""
    ulysses = next(u for u in range(degree, 0, -1) if degree % u == 0 and (u <= heads or heads == 0))
    return Attention(ulysses, degree // ulysses)
