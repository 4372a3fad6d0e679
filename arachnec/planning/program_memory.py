"""By how much a placed plan's programs exceed the memory, everything counted that `check` counts."""

from __future__ import annotations

from collections.abc import Sequence

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module
from arachnec.lowering.programs import lower


def overflow(placed: Module, needed: float, cost: CostModel) -> float:
    """GiB on the rank that exceeds its device most; at most 0 where all fit.

    Beyond the ``needed`` GiB of state and cascades, programs hold what was handed on and waits to be read. They are
    made where that may be too much.
    """
    nodes = machines(cost.cluster)
    free = cost.room + cost.resident - needed + min(cost.spare(machine.memory) for machine in nodes)
    if waiting_at_most(placed.cascades, cost) <= free:
        return 0.0
    lowered = lower(placed)
    values = Values(lowered)
    return max(
        high_water(values, program).total - nodes[node_of(cost.cluster, program.rank)].memory
        for program in lowered.programs
    )


def waiting_at_most(cascades: Sequence[Cascade], cost: CostModel) -> float:
    """GiB of values on the rank that holds most at once, each from its maker's end to its last reader's."""
    named = {cascade.name: cascade for cascade in cascades}
    holders: dict[str, set[int]] = {}
    until: dict[str, float] = {}
    for cascade in cascades:
        for name in cascade.inputs:
            holders.setdefault(name, set(named[name].ranks)).update(cascade.ranks)
            until[name] = max(until.get(name, 0.0), cascade.end)
    changes: dict[int, list[tuple[float, float]]] = {}
    for name, ranks in holders.items():
        size = cost.output(named[name])
        for rank in ranks if size else ():
            changes.setdefault(rank, []).extend(((named[name].end, size), (until[name], -size)))
    return max((_peak(of_rank) for of_rank in changes.values()), default=0.0)


def _peak(changes: list[tuple[float, float]]) -> float:
    most = now = 0.0
    for _, size in sorted(changes, key=lambda change: (change[0], -change[1])):
        now += size
        most = max(most, now)
    return most
