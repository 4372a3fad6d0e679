"""Segments on the ranks that their schedule chose, as early as inputs, ranks and arrivals allow."""

from __future__ import annotations

from collections.abc import Sequence

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module, integers
from arachnec.ir.sampling import arrivals
from arachnec.ir.values import Quantity
from arachnec.planning.cascade_ranks import on
from arachnec.planning.placement import in_order


def placed_segments(module: Module, cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
    """Cascades with ``assigned`` ranks on these, every rank in the order of the schedule."""
    arrived = arrivals(module.clips, cascades)
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for cascade in in_order(cascades):
        ranks = integers(cascade.attrs["assigned"])
        inputs = [done[name] for name in cascade.inputs if name in done]
        placed = on(cascade.with_attrs(assigned=None), ranks, inputs, free, cost)
        late = arrived.get(cascade.name, 0.0) - placed.start
        if late > 0:
            start, end = placed.start + late, placed.end + late
            placed = placed.with_attrs(start=Quantity(round(start, 6), "ms"), end=Quantity(round(end, 6), "ms"))
        done[cascade.name] = placed
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())
