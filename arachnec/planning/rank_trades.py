"""Cascades moved onto aligned groups. In: a placement. Out: one, a little longer, with fewer outside the family.

A cascade moves to an aligned group alone; or its ranks trade places with those of such a group, in all cascades or in
those before or after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from arachnec.analysis.communicators import Ranks, aligned, in_family
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade
from arachnec.planning.placement import end_of, in_order, on_ranks

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
