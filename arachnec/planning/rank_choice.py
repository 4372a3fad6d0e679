"""Which ranks of those that are free a cascade takes. In: a cluster, free ranks and a degree. Out: ranks.

Parts of a node and whole nodes are taken as aligned groups where there are any, ``degree`` consecutive ranks from a
multiple of it on: ranks communicate in process groups, and of those there are few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from arachnec.cluster.topology import nic_of, rack_of
from arachnec.ir.nodes import Cascade, Cluster

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOLERANCE = 1e-6  # ms


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
