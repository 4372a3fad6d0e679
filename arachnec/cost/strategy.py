"""How many ranks a cascade may take, and how they do its work together.

One set of degrees: schedulers choose from it, lower bounds minimise over it, and a schedule by hand with another degree
is refused (``planning.validate``). So no schedule that is accepted can end before the bound. A further way to do the
work is a further field of ``Strategy``: the cost table then has a row for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.ir.nodes import Cascade, Cluster, Phase, Stage, integers
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.sampling import CODING, branches_of
from arachnec.ir.stage_sizes import count_in, most_clips, times_of
from arachnec.ir.tensor_parallel import tensor_parallel


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


# Each degree is at most an eighth above the one before, so steps may be of 8 from 64 on.
STEP = 8
# Beyond so many they grow by about an eighth of themselves: more of them gain nothing, and take time.
FINE = 512


def legal_degrees(cascade: Cascade, stage: Stage, cluster: Cluster) -> tuple[int, ...]:
    """How many ranks a cascade may take, ascending, whether the memory holds them or not.

    Those that were measured; else whole cells, where parameters are dealt out; else the one cell that divides an
    encoder's weights; else those that the stage lists; else those of ``wide_steps`` that leave no rank without a token
    or, of an encoder, without a part of a clip.
    """
    times = times_of(cascade)
    if times:
        return tuple(sorted(degree for degree in times if degree <= cluster.world))
    cell = cell_of(stage) or 1
    if cell > 1:
        return _thinned(range(cell, cluster.world + 1, cell), max(cell, cluster.gpus))
    if (together := tensor_parallel(stage)) > 1:
        return (together,) if together <= cluster.world else ()
    listed = stage.attrs.get("degrees")
    if listed is not None:
        return tuple(sorted(degree for degree in integers(listed) if degree <= cluster.world))
    most = max(cascade.batch, count_in(stage, "divides")) if cascade.phase in CODING else cascade.tokens
    return wide_steps(min(cluster.world, max(1, most)), cluster.gpus)


def wide_steps(largest: int, gpus: int) -> tuple[int, ...]:
    """Degrees up to ``largest``: all to 64, then multiples of 8, whole nodes of ``gpus``, and the last; beyond 512
    fewer of these."""
    degrees = [
        degree
        for degree in range(1, largest + 1)
        if degree <= STEP * STEP or degree == largest or degree % STEP == 0 or degree % max(STEP, gpus) == 0
    ]
    return _thinned(degrees, max(STEP, gpus))


def _thinned(degrees: Sequence[int], unit: int) -> tuple[int, ...]:
    """Ascending degrees, beyond ``FINE`` multiples of ``unit`` alone, about an eighth apart, and the last."""
    return tuple(
        degree for degree in degrees if degree <= FINE or degree == degrees[-1] or degree % _apart(degree, unit) == 0
    )


def _apart(degree: int, unit: int) -> int:
    """The largest ``unit`` times a power of two that is at most an eighth of the power of two below a degree."""
    most = (1 << degree.bit_length() - 1) // STEP
    return unit << max(0, (most // unit).bit_length() - 1)


def sides(cascade: Cascade, stage: Stage, ranks: int) -> tuple[int, ...]:
    """How many of its clips a cascade may run side by side on so many ranks: one, but where parameters are dealt out.
    Of a ``denoise`` its branches.

    Divisors of its clips and of its ranks, with a degree that is legal for one clip.
    """
    if cascade.phase is Phase.DENOISE:
        branches = branches_of(cascade)
        return tuple(side for side in range(1, branches + 1) if branches % side == 0 and ranks % side == 0)
    if (cell_of(stage) or 1) == 1:
        return (1,)
    listed = stage.attrs.get("degrees")
    legal = None if listed is None else set(integers(listed))
    most = most_clips(stage) or cascade.batch
    return tuple(
        side
        for side in range(1, min(cascade.batch, ranks) + 1)
        if cascade.batch % side == 0 and ranks % side == 0 and cascade.batch // side <= most
        if ranks // side <= max(1, cascade.tokens) and (legal is None or ranks // side in legal)
    )
