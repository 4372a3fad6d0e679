"""Cascades on few process groups. In: a placement. Out: one about as long with fewer cascades outside the family.

A device has room for few communicators (``analysis.group_family``). A placement takes any ranks that are free, which
over many plans are other ranks every time. So where ranks are outside the family, others are tried: every cascade waits
for an aligned group; or one is moved to an aligned group; or its ranks trade places with those of such a group, in all
cascades or in those before or after it. What costs more than it is worth stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from arachnec.analysis.group_family import Ranks, aligned, family_grids, heads_of, in_family
from arachnec.cluster.topology import rack_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade
from arachnec.planning.placed_cascade import on
from arachnec.planning.placement import WAIT, end_of, in_cells, in_order, on_ranks, place_among, within_memory
from arachnec.planning.rank_choice import TOLERANCE, pick_ranks

LONGER = 4e-3  # of the makespan that a placement may be longer for fewer cascades outside the family
WORTH = (1.0, 4e-3, 1e-3)  # of the makespan, by which a cascade must end earlier to be outside it
TRIES = 64  # placements that are timed for one cascade
# What is spent on a plan, however large it is: looks at a cascade on a group, some 2 us each, and cascades that are
# timed, some 50 us each.
LOOKS = 400_000
TIMED = 40_000

RanksOf = Mapping[str, Ranks]


def on_few_groups(
    cascades: Sequence[Cascade], best: list[Cascade], cost: CostModel, length: Callable[[list[Cascade]], float] = end_of
) -> list[Cascade]:
    """The placement ``best`` of scheduled ``cascades``, or one with fewer of them outside the family of groups.

    Its last cascade ends at most ``LONGER`` later, and its ``length``, in ms as well, is at most so much more.
    """
    if in_cells(cost) or not outside(best, cost) or cost.devices.kinds:
        return best
    latest = end_of(best) * (1 + LONGER) + TOLERANCE
    affordable = WORTH[: LOOKS // (len(cascades) * cost.cluster.world)]
    waiting = (family_placements(cascades, cost, worth * end_of(best)) for worth in affordable)
    fewest = min(
        (best, *(placed for placed in waiting if end_of(placed) <= latest)), key=lambda p: len(outside(p, cost))
    )
    fewest = _moved(cascades, fewest, cost, latest)
    if fewest is best:
        return best
    try:
        fewest = within_memory(cascades, fewest, cost)
    except UserError:
        return best
    return fewest if length(fewest) <= length(best) * (1 + LONGER) + TOLERANCE else best


def outside(placed: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """The cascades that communicate in other groups than the family's."""
    heads = heads_of(cost.module.stages)
    return [cascade for cascade in placed if not in_family(cost.cluster, cascade, heads)]


def _moved(cascades: Sequence[Cascade], placed: list[Cascade], cost: CostModel, latest: float) -> list[Cascade]:
    """With cascades outside the family moved to aligned groups one by one, where that ends by ``latest``."""
    kept: set[str] = set()
    looks, timings = iter(range(LOOKS // len(placed))), iter(range(TIMED // len(placed)))
    while stray := next((one for one in in_order(outside(placed, cost)) if one.name not in kept), None):
        if next(looks, None) is None:
            break
        number = len(outside(placed, cost))
        moves = islice(_moves(placed, stray, cost, looks), TRIES)
        tried = (on_ranks(cascades, cost, ranks) for ranks, _ in zip(moves, timings, strict=False))
        better = [one for one in tried if end_of(one) <= latest and len(outside(one, cost)) < number]
        if better:
            placed = min(better, key=lambda one: (len(outside(one, cost)), end_of(one)))
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
    groups = sorted(aligned(cost.cluster, stray.width), key=lambda group: -len(set(group).intersection(stray.ranks)))
    for group in groups:
        swap = _exchange(stray.ranks, group)
        for moving in ([stray], turns, turns[place:], turns[: place + 1]):
            if next(looks, None) is None:
                return
            changed = {one.name: tuple(sorted(swap.get(rank, rank) for rank in one.ranks)) for one in moving}
            after = before | changed
            if _unaligned(after) < number:
                yield after


def _exchange(ranks: Ranks, group: Ranks) -> dict[int, int]:
    """Ranks that trade places so that ``ranks`` become ``group``."""
    out, into = sorted(set(ranks) - set(group)), sorted(set(group) - set(ranks))
    return dict(zip(out + into, into + out, strict=True))


def _unaligned(ranks: RanksOf) -> int:
    return sum(group[0] % len(group) != 0 or group[-1] - group[0] >= len(group) for group in ranks.values())


def family_placements(cascades: Sequence[Cascade], cost: CostModel, worth: float) -> list[Cascade]:
    """Every cascade on the aligned group that is free first, or on any ranks where it ends ``worth`` ms earlier.

    A degree that is no size of the family has any ranks.
    """
    cluster = cost.cluster
    sizes = {1, *(ulysses * ring for ulysses, ring in family_grids(cluster, heads_of(cost.module.stages)))}
    free = [0.0] * cluster.world
    done: dict[str, Cascade] = {}
    for cascade in in_order(cascades):
        inputs = [done[name] for name in cascade.inputs if name in done]
        groups = aligned(cluster, cascade.width) if cascade.width in sizes else ()
        anywhere = partial(place_among, cascade, range(cluster.world), inputs, free, cost, pick_ranks)
        if groups:
            placed = on(cascade, _first_free(groups, inputs, free, cascade, cost), inputs, free, cost)
            waits = max(free[rank] for rank in placed.ranks) - sorted(free)[cascade.width - 1]
            if waits >= worth and (other := anywhere()).end + worth <= placed.end:
                placed = other
        else:
            placed = anywhere()
        done[cascade.name] = placed
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())


def _first_free(
    groups: Sequence[tuple[int, ...]],
    inputs: Sequence[Cascade],
    free: Sequence[float],
    cascade: Cascade,
    cost: CostModel,
) -> tuple[int, ...]:
    """The group that can start first; of those in one rack, nearest to the inputs, then the one that idles least."""
    ready = max((producer.end for producer in inputs), default=0.0)
    near = {rank for producer in inputs for rank in producer.ranks}
    slack = TOLERANCE + WAIT * (cascade.end - cascade.start)

    def starts(group: tuple[int, ...]) -> float:
        return max(ready, *(free[rank] for rank in group))

    first = min(map(starts, groups)) + slack

    def order(group: tuple[int, ...]) -> tuple[bool, int, float, int]:
        racks = {rack_of(cost.cluster, group[0]), rack_of(cost.cluster, group[-1])}
        return len(racks) > 1, -len(near.intersection(group)), -sum(free[rank] for rank in group), group[0]

    return min((group for group in groups if starts(group) <= first), key=order)
