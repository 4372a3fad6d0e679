"""Ranks for every cascade, and with them Ulysses x ring and the true times.

Cascades are taken in order of their start. Each gets ranks that are free then, and among those, in this order: those
on which it can start first; on as few nodes as possible, and those in one rack; where its inputs are (a handoff within
a rank costs nothing); in the node whose free ranks it fills best, so that whole nodes stay free for wide cascades;
between nodes on NICs of the same letter, for Arachne's contention penalty. Where a group ends up on more nodes than its
degree needs, it takes longer, and what waits for it or for its ranks starts later: the order on every rank stays as
scheduled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from arachnec.cluster.topology import rack_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cascade, Cluster, Phase
from arachnec.ir.parameter_cells import own_cell
from arachnec.ir.tensor_parallel import ranks_together
from arachnec.planning.cascade_ranks import (
    TOLERANCE,
    on,
    pick_ranks,
    placed_in_turn,
    ranks_from_the_end,
    ranks_from_the_start,
    spread_ranks,
)
from arachnec.planning.handoff_memory import Late, find_overflow, is_roomy, late_order
from arachnec.solver.bound import NEGLIGIBLE


def best_placements(cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """The shortest of ``quick_placements``, or the first that is as long as scheduled.

    Raises UserError where the memory does not hold the values that encoders hand off.
    """
    if in_cells(cost):
        return within_memory(cascades, cell_placements(cascades, cost), cost)
    enough = end_of(cascades) * (1 + NEGLIGIBLE) + TOLERANCE
    tried: list[list[Cascade]] = []
    for placed in quick_placements(cascades, cost):
        tried.append(placed)
        if end_of(placed) <= enough:
            break
    return within_memory(cascades, min(tried, key=end_of), cost)


def quick_placements(cascades: Sequence[Cascade], cost: CostModel) -> Iterator[list[Cascade]]:
    """On ranks near inputs and each other, then, where devices are alike, on ranks that idle least.

    What runs narrow before wide finds the GPUs of a node free together only if those are chosen from the end backwards,
    what runs wide before narrow if each takes those that were just left.
    """
    yield placements(cascades, cost)
    for ranks_of in (ranks_from_the_end, ranks_from_the_start) if not cost.devices.kinds else ():
        yield on_ranks(cascades, cost, ranks_of(cascades, cost.cluster))


def in_cells(cost: CostModel) -> bool:
    """Whether some stage's cascades take whole cells."""
    return any(ranks_together(stage) > 1 for stage in cost.module.stages)


def cell_placements(cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """Every cascade with its ranks: those of a stage in cells, or divided by width, on the cells that are free first.

    Of cells that are free together those next to each other are taken, and nearest to the inputs. Other cascades take
    the ranks that are free first.
    """

    def place(cascade: Cascade, inputs: Sequence[Cascade], free: Sequence[float]) -> Cascade:
        cell = ranks_together(cost.stages[cascade.stage])
        if cell == 1:
            return place_among(cascade, range(cost.cluster.world), inputs, free, cost, pick_ranks)
        return on(cascade, _free_cells(cascade, cell, inputs, free, cost), inputs, free, cost)

    return placed_in_turn(in_order(cascades), cost, place)


def _free_cells(
    cascade: Cascade, cell: int, inputs: Sequence[Cascade], actual: Sequence[float], cost: CostModel
) -> tuple[int, ...]:
    """The ranks of the cells on which a cascade can start first."""
    free = [max(actual[first : first + cell]) for first in range(0, cost.cluster.world, cell)]
    wanted = cascade.width // cell
    ready = max((producer.end for producer in inputs), default=0.0)
    first = max(ready, sorted(free)[wanted - 1]) + TOLERANCE + NEGLIGIBLE * (cascade.end - cascade.start)
    near = {rank // cell for producer in inputs for rank in producer.ranks}
    early = [number for number, moment in enumerate(free) if moment <= first]
    at_hand = frozenset(early)
    runs = [run for at in range(0, len(free), wanted) if at_hand.issuperset(run := range(at, at + wanted))]
    if runs:
        picked = min(runs, key=lambda run: (-len(near.intersection(run)), -sum(free[c] for c in run), run[0]))
        cells: Sequence[int] = picked
    else:
        cells = sorted(sorted(early, key=lambda number: (number not in near, -free[number], number))[:wanted])
    return tuple(rank for number in cells for rank in own_cell(number * cell, cell))


def end_of(cascades: Sequence[Cascade]) -> float:
    """ms at which the last one ends."""
    return max((cascade.end for cascade in cascades), default=0.0)


def within_memory(cascades: Sequence[Cascade], placed: list[Cascade], cost: CostModel) -> list[Cascade]:
    """A placement of ``cascades``, or where it keeps more values waiting than a rank holds one that encodes later.

    Encoders whose values wait longest where memory runs out are late first; after as many rounds as their number has
    binary digits all of them.

    Raises UserError where not even that fits.
    """
    everything = {cascade.name for cascade in cascades if cascade.phase is Phase.ENCODE}
    if not everything or is_roomy(placed, cost):
        return placed
    scheduled = {cascade.name: cascade for cascade in cascades}
    in_turn = [scheduled[cascade.name] for cascade in in_order(placed)]
    ranks = {cascade.name: cascade.ranks for cascade in placed}
    late: set[str] = set()
    rounds = 0
    while (overflow := find_overflow(placed, cost)) is not None:
        if late == everything:
            raise UserError(overflow.worst)
        rounds += 1
        more = overflow.waiting - late
        late = late | more if more and rounds < len(everything).bit_length() else everything
        placed = _encoded_late(late_order(in_turn, ranks, late, cost), cost)
    return placed


def _encoded_late(turns: Sequence[Late], cost: CostModel) -> list[Cascade]:
    """Every cascade in its turn, as early as its inputs and ranks allow."""
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for turn in turns:
        inputs = [done[name] for name in turn.cascade.inputs if name in done]
        begin = max((free[rank] for rank in turn.behind), default=0.0)
        for rank in turn.ranks:
            free[rank] = max(free[rank], begin)
        done[turn.cascade.name] = placed = on(turn.cascade, turn.ranks, inputs, free, cost)
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())


def on_ranks(cascades: Sequence[Cascade], cost: CostModel, ranks: Mapping[str, tuple[int, ...]]) -> list[Cascade]:
    """Every cascade on the ranks of its name, as early as its inputs, their handoffs and its ranks allow."""

    def place(cascade: Cascade, inputs: Sequence[Cascade], free: Sequence[float]) -> Cascade:
        return on(cascade, ranks[cascade.name], inputs, free, cost)

    return placed_in_turn(in_order(cascades), cost, place)


def in_order(cascades: Sequence[Cascade]) -> list[Cascade]:
    """By start, producers before consumers where they are equal."""
    depth: dict[str, int] = {}
    for cascade in cascades:
        depth[cascade.name] = 1 + max((depth[name] for name in cascade.inputs if name in depth), default=0)
    return sorted(cascades, key=lambda cascade: (cascade.start, depth[cascade.name]))


def placements(cascades: Sequence[Cascade], cost: CostModel, *, topology: bool = True) -> list[Cascade]:
    """Every cascade with its ranks, as early as its inputs, their handoffs and the earlier cascades on its ranks allow.

    By the times they were scheduled at, enough ranks are free for each; by the times that the placement gives, some of
    those may be late, and others early. Rather than crossing an uplink a cascade waits for ranks of one rack, where it
    ends earlier so. Where devices differ, the schedule gives the order and the degrees only: a
    cascade goes to the kind of device on which it ends first.
    """
    world = range(cost.cluster.world)
    planned = [0.0 for _ in world]  # when a rank is free by the schedule
    actual = [0.0 for _ in world]  # and when it is, as placed
    done: dict[str, Cascade] = {}
    pick = pick_ranks if topology else spread_ranks
    for cascade in in_order(cascades):
        inputs = [done[name] for name in cascade.inputs if name in done]
        if cost.devices.kinds:
            tried = [place_among(cascade, pool, inputs, actual, cost, pick) for pool in pools(cascade, cost)]
            placed = min(tried, key=lambda option: option.end)
        else:
            begin = cascade.start + TOLERANCE
            free = [rank for rank in world if planned[rank] <= begin]
            if len(free) < cascade.width:
                raise user_error(
                    f"%{cascade.name} takes {cascade.width} ranks at {cascade.start:g} ms, and the schedule leaves "
                    f"{len(free)} free then",
                    label=f"{cascade.width} ranks at {cascade.start:g} ms",
                    help="schedule the cascades again, or start it later or on fewer ranks",
                    span=cascade.span,
                )
            placed = place_among(cascade, free, inputs, actual, cost, pick)
            if topology and len({rack_of(cost.cluster, rank) for rank in placed.ranks}) > 1:
                whole = (ranks for ranks in racks_of(cost.cluster) if len(ranks) >= cascade.width)
                tried = [placed, *(place_among(cascade, ranks, inputs, actual, cost, pick) for ranks in whole)]
                placed = min(tried, key=lambda option: option.end)
        done[cascade.name] = placed
        placed_end, planned_end = placed.end, cascade.end
        for rank in placed.ranks:
            planned[rank], actual[rank] = max(planned[rank], planned_end), placed_end
    return list(done.values())


def racks_of(cluster: Cluster) -> list[list[int]]:
    """The ranks of each rack."""
    racks: dict[int, list[int]] = defaultdict(list)
    for rank in range(cluster.world):
        racks[rack_of(cluster, rank)].append(rank)
    return list(racks.values())


def pools(cascade: Cascade, cost: CostModel) -> list[Sequence[int]]:
    """The ranks of each kind of device, and of those with most memory together, that can hold the cascade."""
    together = list(accumulate(cost.devices.kinds))[1:]
    return [
        ranks
        for ranks in (*cost.devices.kinds, *together)
        if len(ranks) >= cascade.width and cost.recompute_at(cascade, cascade.width, ranks) is not None
    ]


def place_among(
    cascade: Cascade,
    pool: Sequence[int],
    inputs: Sequence[Cascade],
    actual: Sequence[float],
    cost: CostModel,
    pick: Callable[[Cluster, Sequence[int], int, set[int]], tuple[int, ...]],
) -> Cascade:
    """The cascade on ranks of the pool, as early as its inputs and ``actual``, when each rank is free, allow."""
    ready = max((producer.end for producer in inputs), default=0.0)
    first = max(ready, *sorted(actual[rank] for rank in pool)[: cascade.width])
    slack = TOLERANCE + NEGLIGIBLE * (cascade.end - cascade.start)
    early = [rank for rank in pool if actual[rank] <= first + slack]
    ranks = pick(cost.cluster, early, cascade.width, {rank for c in inputs for rank in c.ranks})
    return on(cascade, ranks, inputs, actual, cost)
