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
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from arachnec.cluster.topology import handoff_time, nic_of, node_of, rack_of
from arachnec.cost.memory import GIB
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Strategy
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Cluster, Phase
from arachnec.ir.stage_sizes import times_of
from arachnec.ir.values import Quantity
from arachnec.planning.handoff_memory import Late, find_overflow, is_roomy, late_order

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


TOLERANCE = 1e-6  # ms

LATE = 5e-4  # of the makespan, by which a placement may be longer before another is tried

ROUNDS = 16  # in which more encoders are late, before all are

WAIT = 0.01  # of its own duration that a cascade may start later for better ranks


def best_placements(cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """The shortest of placements: ranks near inputs and each other, and, where that is late, ranks that idle least.

    What runs narrow before wide finds the GPUs of a node free together only if those are chosen from the end backwards,
    what runs wide before narrow if each takes those that were just left.

    Raises UserError where the memory does not hold the values that encoders hand off.
    """
    forwards = placements(cascades, cost)
    planned = max((cascade.end for cascade in cascades), default=0.0)
    late = max((cascade.end for cascade in forwards), default=0.0)
    found = forwards
    for ranks_of in (ranks_from_the_end, ranks_from_the_start):
        if cost.devices.kinds or late <= planned * (1 + LATE) + TOLERANCE:
            break
        tried = on_ranks(cascades, cost, ranks_of(cascades, cost.cluster))
        end = max(cascade.end for cascade in tried)
        if end < late:
            found, late = tried, end
    return within_memory(cascades, found, cost)


def within_memory(cascades: Sequence[Cascade], placed: list[Cascade], cost: CostModel) -> list[Cascade]:
    """A placement of ``cascades``, or where it keeps more values waiting than a rank holds one that encodes later.

    Encoders whose values wait longest where memory runs out are late first, in the end all of them.

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
        late = late | more if more and rounds < ROUNDS else everything
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
        done[turn.cascade.name] = placed = _on(turn.cascade, turn.ranks, inputs, free, cost)
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())


def on_ranks(cascades: Sequence[Cascade], cost: CostModel, ranks: Mapping[str, tuple[int, ...]]) -> list[Cascade]:
    """Every cascade on the ranks of its name, as early as its inputs, their handoffs and its ranks allow."""
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for cascade in in_order(cascades):
        inputs = [done[name] for name in cascade.inputs if name in done]
        done[cascade.name] = placed = _on(cascade, ranks[cascade.name], inputs, free, cost)
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())


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
            tried = [_placed(cascade, pool, inputs, actual, cost, pick) for pool in pools(cascade, cost)]
            placed = min(tried, key=lambda candidate: candidate.end)
        else:
            begin = cascade.start + TOLERANCE
            free = [rank for rank in world if planned[rank] <= begin]
            placed = _placed(cascade, free, inputs, actual, cost, pick)
            if topology and len({rack_of(cost.cluster, rank) for rank in placed.ranks}) > 1:
                racks = (ranks for ranks in racks_of(cost.cluster) if len(ranks) >= cascade.degree)
                tried = [placed, *(_placed(cascade, ranks, inputs, actual, cost, pick) for ranks in racks)]
                placed = min(tried, key=lambda candidate: candidate.end)
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
        if len(ranks) >= cascade.degree and cost.recompute_at(cascade, cascade.degree, ranks) is not None
    ]


def _placed(
    cascade: Cascade,
    pool: Sequence[int],
    inputs: Sequence[Cascade],
    actual: Sequence[float],
    cost: CostModel,
    pick: Callable[[Cluster, Sequence[int], int, set[int]], tuple[int, ...]],
) -> Cascade:
    """The cascade on ranks of the pool, as early as its inputs and ``actual``, when each rank is free, allow."""
    ready = max((producer.end for producer in inputs), default=0.0)
    first = max(ready, *sorted(actual[rank] for rank in pool)[: cascade.degree])
    slack = TOLERANCE + WAIT * (cascade.end - cascade.start)
    early = [rank for rank in pool if actual[rank] <= first + slack]
    ranks = pick(cost.cluster, early, cascade.degree, {rank for c in inputs for rank in c.ranks})
    return _on(cascade, ranks, inputs, actual, cost)


def _on(
    cascade: Cascade, ranks: tuple[int, ...], inputs: Sequence[Cascade], actual: Sequence[float], cost: CostModel
) -> Cascade:
    placed = with_ranks(cascade, ranks, cost)
    arrived = max((producer.end + arrival(producer, placed, cost) for producer in inputs), default=0.0)
    start = max(arrived, *(actual[rank] for rank in ranks))
    return placed.with_attrs(start=_ms(start), end=_ms(start + (placed.end - placed.start)))


def pick_ranks(cluster: Cluster, free: Sequence[int], degree: int, near: set[int]) -> tuple[int, ...]:
    """``degree`` of the free ranks, ascending; ``near`` are the ranks that hold the inputs.

    Raises ValueError where fewer are free.
    """
    if len(free) < degree:
        raise ValueError(f"degree {degree} with {len(free)} ranks free")
    gpus = cluster.gpus
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in free:
        nodes[rank // gpus].append(rank)
    near_racks = {rack_of(cluster, rank) for rank in near}
    roomy = [node for node, ranks in nodes.items() if len(ranks) >= degree]
    if roomy:

        def within(node: int) -> tuple[int, bool, int, int]:
            far = rack_of(cluster, nodes[node][0]) not in near_racks
            return -len(near.intersection(nodes[node])), far, len(nodes[node]), node

        return _within(nodes[min(roomy, key=within)], degree, near)
    racks = _racks(cluster, nodes, degree, near)
    fullest = sorted(
        nodes,
        key=lambda node: (
            racks.index(rack_of(cluster, nodes[node][0])),
            -len(nodes[node]),
            -len(near.intersection(nodes[node])),
            node,
        ),
    )
    picked: list[int] = []
    letters: set[str] = set()
    for node in fullest:
        wanted = degree - len(picked)
        matching = sorted(nodes[node], key=lambda rank: (nic_of(cluster, rank) not in letters, rank))
        picked += matching[:wanted]
        letters |= {nic_of(cluster, rank) for rank in matching[:wanted]}
        if len(picked) == degree:
            break
    return tuple(sorted(picked))


def spread_ranks(cluster: Cluster, free: Sequence[int], degree: int, near: set[int]) -> tuple[int, ...]:
    """``degree`` of the free ranks at equal distances, whatever their nodes and wherever the inputs are."""
    return tuple(sorted(free)[index * len(free) // degree] for index in range(degree))


def _racks(cluster: Cluster, nodes: dict[int, list[int]], degree: int, near: set[int]) -> list[int]:
    """The racks in the order in which a cascade of several nodes should take them, so that it crosses few uplinks.

    First comes one that holds all of it, on as few nodes as can be, else the one with most free ranks.
    """
    free: dict[int, list[list[int]]] = defaultdict(list)
    for ranks in nodes.values():
        free[rack_of(cluster, ranks[0])].append(ranks)

    def order(rack: int) -> tuple[int, int, int, int]:
        sizes = sorted((len(ranks) for ranks in free[rack]), reverse=True)
        room, here = sum(sizes), sum(len(near.intersection(ranks)) for ranks in free[rack])
        if room < degree:
            return len(nodes) + 1, -room, -here, rack
        needed = next(count for count, total in enumerate(accumulate(sizes), 1) if total >= degree)
        return needed, -here, room, rack

    return sorted(free, key=order)


def ranks_from_the_end(cascades: Sequence[Cascade], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """For every cascade, last ends first, ranks that are free until then, and for the shortest time after it.

    An aligned block where there is one, else ranks of one node, else whole nodes, else any.
    """
    last = max((cascade.end for cascade in cascades), default=0.0)
    return _ranks_in_turn([(last - each.end, last - each.start, each) for each in cascades], cluster)


def ranks_from_the_start(cascades: Sequence[Cascade], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """For every cascade, first starts first, ranks that are free then, and have been for the shortest time."""
    return _ranks_in_turn([(cascade.start, cascade.end, cascade) for cascade in cascades], cluster)


def _ranks_in_turn(times: Sequence[tuple[float, float, Cascade]], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Ranks for every cascade from its start to its end; of those that start together the widest is first."""
    import numpy as np

    free = np.zeros((cluster.nodes, cluster.gpus))  # ms from which on each rank is
    ranks_of: dict[str, tuple[int, ...]] = {}
    for start, end, cascade in sorted(times, key=lambda row: (row[0], -row[2].degree)):
        degree = cascade.degree
        idle = np.where(free <= start + TOLERANCE, start - free, np.inf)
        ranks = _least_idle(idle, degree, cluster.gpus)
        if ranks is None:
            ranks = pick_ranks(cluster, np.flatnonzero(np.isfinite(idle)).tolist(), degree, set())
        free.reshape(-1)[list(ranks)] = end
        ranks_of[cascade.name] = ranks
    return ranks_of


def _least_idle(idle: NDArray[np.float64], degree: int, gpus: int) -> tuple[int, ...] | None:
    """Ranks of one node, or whole nodes, that idle least in all; ``idle`` is nodes x GPUs, infinite where not free."""
    import numpy as np

    if degree >= gpus:
        full_nodes, part = divmod(degree, gpus)
        nodes = idle.sum(axis=1)
        best = np.argsort(nodes, kind="stable")[:full_nodes]
        if part or not np.isfinite(nodes[best]).all():
            return None
        return tuple(sorted(int(node) * gpus + gpu for node in best for gpu in range(gpus)))
    if gpus % degree == 0:
        blocks = idle.reshape(-1, degree).sum(axis=1)
        block = int(blocks.argmin())
        if np.isfinite(blocks[block]):
            return tuple(range(block * degree, (block + 1) * degree))
    order = np.argsort(idle, axis=1, kind="stable")[:, :degree]
    sums = np.take_along_axis(idle, order, axis=1).sum(axis=1)
    node = int(sums.argmin())
    return tuple(sorted(node * gpus + int(gpu) for gpu in order[node])) if np.isfinite(sums[node]) else None


def _within(ranks: list[int], degree: int, near: set[int]) -> tuple[int, ...]:
    """A run of neighbours at a multiple of the degree where there is one, else those nearest to the inputs."""
    present = set(ranks)
    if degree == 1:
        return (min(ranks, key=lambda rank: (rank not in near, rank ^ 1 in present, rank)),)
    blocks = [
        range(first, first + degree)
        for first in sorted({rank - rank % degree for rank in ranks})
        if present.issuperset(range(first, first + degree))
    ]
    if blocks:
        best = min(blocks, key=lambda block: (-len(near.intersection(block)), block[0]))
        return tuple(best)
    return tuple(sorted(sorted(ranks, key=lambda rank: (rank not in near, rank))[:degree]))


def with_ranks(cascade: Cascade, ranks: tuple[int, ...], cost: CostModel) -> Cascade:
    """The cascade on these ranks, with the cheapest product of Ulysses and ring, as long as it takes there."""
    recompute = cascade.recompute
    if cost.devices.kinds:
        recompute = cost.recompute_at(cascade, cascade.degree, ranks) is True
    entry = cost.table.entry(cascade, cascade.degree, ranks, Strategy(recompute=recompute))
    split = entry.strategy.attention if cost.has_attention(cascade) else None
    duration = cascade.end - cascade.start
    if cost.devices.kinds:
        memory = Quantity(round(entry.memory, 6), "GiB")
        cascade = cascade.with_attrs(recompute=True if recompute else None, memory=memory)
        duration = entry.time
    elif not times_of(cascade) and len({node_of(cost.cluster, rank) for rank in ranks}) > 1:
        # the tick to which the scheduler rounded up is not taken away again
        duration = max(duration, entry.time)
    return cascade.with_attrs(
        ranks=ranks,
        ulysses=split.ulysses if split else None,
        ring=split.ring if split else None,
        end=Quantity(cascade.start + duration, "ms"),
    )


def arrival(producer: Cascade, consumer: Cascade, cost: CostModel) -> float:
    """ms after the producer's end at which the consumer's last rank has its output."""
    size = cost.output(producer) * GIB
    if not size:
        return 0.0
    source = producer.ranks[0]
    targets = [rank for rank in consumer.ranks if rank not in producer.ranks]
    return max((handoff_time(cost.cluster, source, rank, size) for rank in targets), default=0.0)


def _ms(value: float) -> Quantity:
    return Quantity(round(value, 6), "ms")
