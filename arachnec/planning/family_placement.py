"""Cascades on few process groups. In: a schedule. Out: a placement whose groups are mostly those of the family.

A device has room for few communicators (``analysis.group_family``). The scheduler takes degrees of the family, and
ranks that are free together are mostly aligned. Where some are not, every cascade waits for an aligned group in its
turn. Each group outside the family has a price: a placement with more of them is taken only where it is so much
shorter. In the end cascades that are still outside are moved (``moved``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from arachnec.analysis.communicators import Ranks, aligned, in_family
from arachnec.cluster.topology import rack_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Cluster
from arachnec.planning.cascade_ranks import TOLERANCE, on, pick_ranks
from arachnec.planning.placement import end_of, in_order, on_ranks, place_among, pools, quick_placements, within_memory
from arachnec.solver.bound import NEGLIGIBLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# What is spent on a plan, however large it is: cascades that are put on ranks, some 50 us each, and looks at a cascade
# on a group, some 2 us each.
PLACED = 16_000
LOOKS = 400_000

RanksOf = Mapping[str, Ranks]


def outside(placed: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """The cascades that communicate in other groups than the family's."""
    return [cascade for cascade in placed if not in_family(cascade, cost.family_grids)]


def moved(cascades: Sequence[Cascade], placed: list[Cascade], cost: CostModel, latest: float) -> list[Cascade]:
    """With cascades outside the family moved to aligned groups one by one, where the last still ends by ``latest``.

    Each has an equal share of the placements that are tried.

    A cascade moves to an aligned group alone; or its ranks trade places with those of such a group, in all cascades or
    in those before or after it.
    """
    kept: set[str] = set()
    looks, left = iter(range(LOOKS // max(1, len(placed)))), PLACED // max(1, len(placed))
    strays = outside(placed, cost)
    while waiting := [one for one in in_order(strays) if one.name not in kept]:
        if next(looks, None) is None:
            break
        stray, share = waiting[0], -(-left // len(waiting))
        moves = list(islice(_moves(placed, stray, cost, looks), share))
        left -= len(moves)
        tried = (on_ranks(cascades, cost, ranks) for ranks in moves)
        counted = ((len(outside(one, cost)), end_of(one), one) for one in tried if end_of(one) <= latest)
        number, _, best = min(counted, key=lambda row: row[:2], default=(len(strays), latest, placed))
        if number < len(strays):
            placed, strays = best, outside(best, cost)
        else:
            kept.add(stray.name)
    return placed


def _moves(placed: Sequence[Cascade], stray: Cascade, cost: CostModel, looks: Iterator[int]) -> Iterator[RanksOf]:
    """Ranks of all cascades under which this one is on an aligned group and more of them are than before.

    As many are looked at as ``looks`` has left.
    """
    before = {cascade.name: cascade.ranks for cascade in placed}
    turns = in_order(placed)
    place = next(index for index, cascade in enumerate(turns) if cascade.name == stray.name)
    number = _unaligned(before)
    groups = sorted(aligned(cost.cluster, stray.degree), key=lambda group: -len(set(group).intersection(stray.ranks)))
    for group in groups:
        swap = _exchange(stray.ranks, group)
        for moving in ([stray], turns, turns[place:], turns[: place + 1]):
            if next(looks, None) is None:
                return
            changed = {one.name: tuple(sorted(swap.get(rank, rank) for rank in one.ranks)) for one in moving}
            after = before | changed
            if _unaligned(after) < number and _fits(moving, changed, cost):
                yield after


def _fits(moving: Sequence[Cascade], ranks: RanksOf, cost: CostModel) -> bool:
    """Whether the devices of the new ranks hold what moves; where all are alike they do."""
    return not cost.devices.kinds or all(
        cost.recompute_at(cascade, cascade.degree, ranks[cascade.name]) is not None for cascade in moving
    )


def _exchange(ranks: Ranks, group: Ranks) -> dict[int, int]:
    """Ranks that trade places so that ``ranks`` become ``group``."""
    out, into = sorted(set(ranks) - set(group)), sorted(set(group) - set(ranks))
    return dict(zip(out + into, into + out, strict=True))


def _unaligned(ranks: RanksOf) -> int:
    return sum(group[0] % len(group) != 0 or group[-1] - group[0] >= len(group) for group in ranks.values())


PRICE = 5e-3  # of the iteration, of each group outside the family


def placed_on_few_groups(cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """What ``place`` makes of a schedule: ``priced_placement`` with the cascades outside the family moved into it.

    The last cascade ends at most the price of one group later for that. Raises UserError where the memory does not
    hold the values that encoders hand off.
    """
    best = priced_placement(cascades, cost)
    latest = end_of(best) * (1 + PRICE) + TOLERANCE
    fewer = moved(cascades, best, cost, latest)
    if fewer is best:
        return best
    try:
        fewer = within_memory(cascades, fewer, cost)
    except UserError:
        return best
    return fewer if end_of(fewer) <= latest else best


def priced_placement(cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """The placement of scheduled ``cascades`` that is shortest, with the price of its groups outside the family.

    Others are tried until one is as long as scheduled. Raises UserError where the memory does not hold the values that
    encoders hand off.
    """
    enough = end_of(cascades) * (1 + NEGLIGIBLE) + TOLERANCE
    best: tuple[float, list[Cascade]] | None = None
    count = max(1, PLACED // max(1, len(cascades)))
    for placed in islice(_candidates(cascades, cost, one=count == 1), count):
        priced = end_of(placed) * markup(placed, cost)
        if best is None or priced < best[0]:
            best = priced, placed
        if best[0] <= enough:
            break
    assert best is not None, "there is always one"
    return within_memory(cascades, best[1], cost)


def _candidates(cascades: Sequence[Cascade], cost: CostModel, *, one: bool) -> Iterator[list[Cascade]]:
    """First ranks that are free, then aligned groups, then what idles least; of one alone the aligned groups."""
    quick = quick_placements(cascades, cost)
    waiting = (family_placements(cascades, cost, worth) for worth in (math.inf, PRICE * end_of(cascades)))
    if one:
        yield next(waiting)
    first = next(quick)
    yield first
    if outside(first, cost):
        yield from waiting
    yield from quick


def markup(placed: Sequence[Cascade], cost: CostModel) -> float:
    """What the length of a placement is multiplied by for its groups outside the family."""
    groups = {(cascade.ranks, cascade.attrs.get("ulysses")) for cascade in outside(placed, cost)}
    return 1 + PRICE * len(groups)


def family_placements(cascades: Sequence[Cascade], cost: CostModel, worth: float) -> list[Cascade]:
    """Every cascade on the aligned group that is free first, or on any ranks where it ends ``worth`` ms earlier.

    Where devices differ, on the kind of device on which it ends first. A degree that is none of the family has any
    ranks.
    """
    import numpy as np

    free = np.zeros(cost.cluster.world)  # ms from which on each rank is
    times: list[float] = free.tolist()  # the same, to be read one by one
    done: dict[str, Cascade] = {}
    for cascade in in_order(cascades):
        inputs = [done[name] for name in cascade.inputs if name in done]
        groups = [choice.first_free(cascade, inputs, free) for choice in _pools_of_groups(cascade, cost)]
        if groups:
            placed = min((on(cascade, ranks, inputs, times, cost) for ranks in groups), key=lambda one: one.end)
            waits = placed.start - float(np.sort(free)[cascade.degree - 1])  # so many ranks are free together then
            if waits >= worth and (other := _anywhere(cascade, inputs, times, cost)).end + worth <= placed.end:
                placed = other
        else:
            placed = _anywhere(cascade, inputs, times, cost)
        done[cascade.name] = placed
        free[list(placed.ranks)] = placed.end
        for rank in placed.ranks:
            times[rank] = placed.end
    return list(done.values())


def _anywhere(cascade: Cascade, inputs: Sequence[Cascade], times: Sequence[float], cost: CostModel) -> Cascade:
    """On any ranks, of each pool of devices where they differ."""
    every = pools(cascade, cost) if cost.devices.kinds else [range(cost.cluster.world)]
    return min((place_among(cascade, pool, inputs, times, cost, pick_ranks) for pool in every), key=lambda one: one.end)


def _pools_of_groups(cascade: Cascade, cost: CostModel) -> list[_Groups]:
    """The aligned groups that a cascade may take, of every pool of devices that has some."""
    if cascade.degree not in cost.family_degrees:
        return []
    every = map(tuple, pools(cascade, cost)) if cost.devices.kinds else (None,)
    groups = (_groups(cost.cluster, cascade.degree, pool) for pool in every)
    return [group for group in groups if len(group.ranks)]


@dataclass(frozen=True)
class _Groups:
    """The aligned groups of one size, as rows, and whether each crosses racks."""

    ranks: NDArray[np.int64]
    crossing: NDArray[np.bool_]

    def first_free(self, cascade: Cascade, inputs: Sequence[Cascade], free: NDArray[np.float64]) -> Ranks:
        """The one that can start first; of those in one rack, nearest to the inputs, then the one that idles least."""
        import numpy as np

        ready = max((producer.end for producer in inputs), default=0.0)
        idle = free[self.ranks]
        starts = np.maximum(idle.max(axis=1), ready)
        slack = TOLERANCE + NEGLIGIBLE * (cascade.end - cascade.start)
        near = np.zeros(len(free), dtype=bool)
        near[[rank for producer in inputs for rank in producer.ranks]] = True
        early = np.flatnonzero(starts <= starts.min() + slack)
        rows = self.ranks[early]
        order = np.lexsort((-idle[early].sum(axis=1), -near[rows].sum(axis=1), self.crossing[early]))
        return tuple(rows[order[0]].tolist())


@lru_cache(maxsize=256)
def _groups(cluster: Cluster, degree: int, pool: Ranks | None) -> _Groups:
    """Those among the ranks of the pool; of all ranks without one."""
    import numpy as np

    members = None if pool is None else frozenset(pool)
    groups = [group for group in aligned(cluster, degree) if members is None or members.issuperset(group)]
    crossing = [rack_of(cluster, group[0]) != rack_of(cluster, group[-1]) for group in groups]
    return _Groups(np.array(groups, dtype=np.int64).reshape(len(groups), degree), np.array(crossing, dtype=bool))
