"""One cascade's ranks: which of the free ones it takes, its mesh of Ulysses x ring, its start and end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from arachnec.cluster.topology import handoff_time, nic_of, node_of, rack_of
from arachnec.cost.memory import GIB
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention, Strategy, first_ranks, sides_of
from arachnec.cost.table import Entry
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.nodes import Cascade, Cluster, Phase
from arachnec.ir.stage_sizes import gib, recompute_value, times_of
from arachnec.ir.values import Quantity
from arachnec.lowering.order import reads_saved
from arachnec.solver.bound import NEGLIGIBLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def on(
    cascade: Cascade, ranks: tuple[int, ...], inputs: Sequence[Cascade], actual: Sequence[float], cost: CostModel
) -> Cascade:
    placed = with_ranks(cascade, ranks, cost, _recomputed(cascade, ranks, inputs, cost))
    arrived = max((producer.end + arrival(producer, placed, cost) for producer in inputs), default=0.0)
    start = max(arrived, *(actual[rank] for rank in ranks))
    return placed.with_attrs(start=_ms(start), end=_ms(start + (placed.end - placed.start)))


def placed_in_turn(
    cascades: Iterable[Cascade],
    cost: CostModel,
    place: Callable[[Cascade, Sequence[Cascade], Sequence[float]], Cascade],
) -> list[Cascade]:
    """Every cascade as ``place(cascade, inputs, free)`` puts it on ranks; ``free`` is when each rank is, in ms."""
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for cascade in cascades:
        inputs = [done[name] for name in cascade.inputs if name in done]
        done[cascade.name] = placed = place(cascade, inputs, free)
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())


def _recomputed(cascade: Cascade, ranks: tuple[int, ...], inputs: Sequence[Cascade], cost: CostModel) -> int:
    """How many blocks it recomputes on these ranks: what fits their devices. A forward of a pipeline no fewer than
    planned, since others' values lie there, too; its backward as many as it."""
    planned = cost.recomputed(cascade)
    if not cost.devices.kinds:
        return planned
    if cascade.phase is Phase.BACKWARD:
        return next((cost.recomputed(source) for source in inputs if reads_saved(cascade, source)), planned)
    least = cost.recompute_at(cascade, cascade.width, ranks) or 0
    return max(planned, least) if cascade.phase is Phase.FORWARD else least


def with_ranks(cascade: Cascade, ranks: tuple[int, ...], cost: CostModel, recompute: int) -> Cascade:
    """The cascade on these ranks, with the cheapest product of Ulysses and ring, as long as it takes there."""
    if cost.devices.kinds and cascade.phase is Phase.DENOISE:  # on these ranks branches may lie better otherwise
        cascade = divided(cascade, len(ranks), _best_way(cascade, ranks, cost))
    cheapest = cost.table.entry(cascade, cascade.width, ranks, sides_of(cascade, recompute))
    entry = _on_family_grid(cascade, ranks, cheapest, cost) if cost.has_attention(cascade) else cheapest
    split = entry.strategy.attention if cost.has_attention(cascade) else None
    duration = cascade.end - cascade.start + max(0.0, entry.time - cheapest.time)
    if cost.devices.kinds:
        memory = Quantity(round(entry.memory, 6), "GiB")
        cascade = cascade.with_attrs(recompute=recompute_value(recompute, cost.stages[cascade.stage]), memory=memory)
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


def _best_way(cascade: Cascade, ranks: tuple[int, ...], cost: CostModel) -> Strategy:
    """How these ranks do a denoise soonest, of the ways that fit beside every model, since nobody knows yet which lie
    here, or that need no more than what was planned; as it was planned where none does."""
    whole = cascade.with_attrs(planned=None)  # what a switch may leave of it decides nothing
    ways = cost.table.ways(whole, len(ranks), ranks)
    rows = [cost.table.entry(whole, len(ranks), ranks, way) for way in ways]
    planned = cost.table.entry(whole, len(ranks), ranks, sides_of(cascade))
    alone = cost.room_on(ranks, len(ranks), cascade.stage)
    others = sum(gib(stage.attrs.get("state")) for stage in cost.stages.values() if stage.name != cascade.stage)
    room = max(alone - others, min(planned.memory, alone))
    best = min((row for row in rows if row.memory <= room), key=lambda row: row.time, default=None)
    return sides_of(cascade) if best is None else replace(best.strategy, attention=None)


def divided(cascade: Cascade, width: int, strategy: Strategy) -> Cascade:
    """A cascade whose clips or branches lie side by side on so many ranks as a strategy says."""
    side, other = strategy.sides, strategy.unconditional
    return cascade.with_attrs(
        degree=first_ranks(strategy, width),
        side=side if side > 1 else None,
        unconditional=None if other is None else (other.ulysses, other.ring),
    )


def _on_family_grid(cascade: Cascade, ranks: tuple[int, ...], cheapest: Entry, cost: CostModel) -> Entry:
    """The cheapest grid, or the cheapest of the family's that takes negligibly longer."""
    grids = cost.family_grids
    split = cheapest.strategy.attention
    if cascade.degree == 1 or sparse_layers(cascade) or (split is not None and (split.ulysses, split.ring) in grids):
        return cheapest
    offered = [
        cost.table.entry(cascade, cascade.width, ranks, replace(cheapest.strategy, attention=Attention(ulysses, ring)))
        for ulysses, ring in grids
        if ulysses * ring == cascade.degree
    ]
    best = min(offered, key=lambda entry: entry.time, default=cheapest)
    return best if best.time <= cheapest.time * (1 + NEGLIGIBLE) else cheapest


def arrival(producer: Cascade, consumer: Cascade, cost: CostModel) -> float:
    """ms after the producer's end at which the consumer's last rank has what it reads of it."""
    size = cost.handed(producer, consumer) * GIB
    if not size:
        return 0.0
    holders = producer.ranks
    targets = [rank for rank in consumer.ranks if rank not in holders]
    return max((handoff_time(cost.cluster, holders[0], rank, size) for rank in targets), default=0.0)


def _ms(value: float) -> Quantity:
    return Quantity(round(value, 6), "ms")


TOLERANCE = 1e-6  # ms


def pick_ranks(cluster: Cluster, free: Sequence[int], degree: int, near: set[int]) -> tuple[int, ...]:
    """``degree`` of the free ranks, ascending; ``near`` are the ranks that hold the inputs.

    Raises ValueError where fewer are free.

    Parts of a node and whole nodes are taken as aligned groups where there are any, ``degree`` consecutive ranks from a
    multiple of it on: ranks communicate in process groups, and of those there are few.
    """
    if len(free) < degree:
        raise ValueError(f"degree {degree} with {len(free)} ranks free")
    gpus = cluster.gpus
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in free:
        nodes[rank // gpus].append(rank)
    near_racks = {rack_of(cluster, rank) for rank in near}
    whole = [node for node, ranks in nodes.items() if len(ranks) >= degree]
    if whole:

        def within(node: int) -> tuple[bool, int, bool, int, int]:
            far = rack_of(cluster, nodes[node][0]) not in near_racks
            apart = degree > 1 and gpus % degree == 0 and not _runs(nodes[node], degree)
            return apart, -len(near.intersection(nodes[node])), far, len(nodes[node]), node

        return _within(nodes[min(whole, key=within)], degree, near)
    racks = _racks(cluster, nodes, degree, near)
    if degree % gpus == 0:
        runs = [run for run in _runs(sorted(free), degree) if len({rack_of(cluster, rank) for rank in run}) == 1]
        if runs:
            return min(runs, key=lambda run: (racks.index(rack_of(cluster, run[0])), -len(near.intersection(run))))
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
    return _ranks_in_turn([(last - cascade.end, last - cascade.start, cascade) for cascade in cascades], cluster)


def ranks_from_the_start(cascades: Sequence[Cascade], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """For every cascade, first starts first, ranks that are free then, and have been for the shortest time."""
    return _ranks_in_turn([(cascade.start, cascade.end, cascade) for cascade in cascades], cluster)


def _ranks_in_turn(times: Sequence[tuple[float, float, Cascade]], cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """Ranks for every cascade from its start to its end; of those that start together the widest is first."""
    import numpy as np

    free = np.zeros((cluster.nodes, cluster.gpus))  # ms from which on each rank is
    ranks_of: dict[str, tuple[int, ...]] = {}
    for start, end, cascade in sorted(times, key=lambda row: (row[0], -row[2].degree)):
        degree = cascade.width
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
        whole, part = divmod(degree, gpus)
        nodes = idle.sum(axis=1)
        runs = nodes[: len(nodes) // whole * whole].reshape(-1, whole).sum(axis=1)
        run = int(runs.argmin()) if runs.size else 0
        if not part and runs.size and np.isfinite(runs[run]):
            return tuple(range(run * degree, (run + 1) * degree))
        best = np.argsort(nodes, kind="stable")[:whole]
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
    if degree == 1:
        present = set(ranks)
        return (min(ranks, key=lambda rank: (rank not in near, rank ^ 1 in present, rank)),)
    runs = _runs(ranks, degree)
    if runs:
        return min(runs, key=lambda run: (-len(near.intersection(run)), run[0]))
    return tuple(sorted(sorted(ranks, key=lambda rank: (rank not in near, rank))[:degree]))


def _runs(ranks: Sequence[int], degree: int) -> list[tuple[int, ...]]:
    """Those of the aligned groups of this size that are among the ranks."""
    present = set(ranks)
    runs = (range(first, first + degree) for first in sorted({rank - rank % degree for rank in ranks}))
    return [tuple(run) for run in runs if present.issuperset(run)]
