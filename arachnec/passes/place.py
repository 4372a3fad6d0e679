"""``place``: ranks for every cascade, and with them Ulysses x ring and the true times (``planning.placement``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, quantity
from arachnec.ir.sampling import is_sampling
from arachnec.ir.values import Quantity
from arachnec.passes.infra.base import Pass
from arachnec.planning.cascade_ranks import TOLERANCE
from arachnec.planning.family_placement import placed_on_few_groups
from arachnec.planning.formulate import problem_of
from arachnec.planning.lower_bounds import bound_of
from arachnec.planning.pipeline_places import is_pipeline, stage_places, staged_placements
from arachnec.planning.placement import best_placements, in_cells, placements, within_memory
from arachnec.planning.sampling.chains import placed_segments
from arachnec.solver.problem import TICKS


@dataclass(frozen=True)
class Place(Pass):
    """Which ranks, and when exactly.

    Without ``topology`` a cascade is spread over the ranks on which it can start first, as over a mesh whose innermost
    dimension is data parallel. It is there to be compared with.

    The stages of a pipeline have a place (``planning.pipeline_places``): there, and as scheduled, run their cascades.
    """

    needs: ClassVar[Level] = Level.SCHEDULED
    gives: ClassVar[Level] = Level.PLACED

    topology: bool = True

    def run(self, module: Module) -> Module:
        cost, places = CostModel(module), stage_places(module)
        placed = self._staged(module, cost, places) or self._placements(module.cascades, cost)
        named = {cascade.name: cascade for cascade in placed}
        cascades = tuple(named[cascade.name] for cascade in module.cascades)
        makespan = max((cascade.end for cascade in cascades), default=0.0)
        as_planned = makespan <= quantity(module.attrs["makespan"]) + TOLERANCE
        attrs = module.attrs
        # The schedule, and so its bound, counted them as if all were the fastest. That of sampling is of its objective,
        # whatever the borders of segments, which these cascades have fixed.
        if cost.devices.kinds and not is_sampling(module):
            bound = Quantity(bound_of(module, cost, problem_of(module, cost)) / TICKS, "ms")
            attrs = attrs.updated(bound=bound, area_bound=bound)
        return replace(
            module,
            level=Level.PLACED,
            cascades=cascades,
            reductions=tuple(
                replace(node, attrs=node.attrs.updated(ranks=places[node.stage])) for node in module.reductions
            ),
            attrs=attrs.updated(
                makespan=Quantity(makespan, "ms"), proved=as_planned and module.attrs["proved"] is True
            ),
        )

    def _staged(self, module: Module, cost: CostModel, places: Mapping[str, tuple[int, ...]]) -> list[Cascade] | None:
        """Of a pipeline, and of sampling whose schedule chose the ranks; None for others."""
        if is_pipeline(module):
            return staged_placements(module.cascades, cost, places)
        if is_sampling(module) and all("assigned" in cascade.attrs for cascade in module.cascades):
            return placed_segments(module, module.cascades, cost)
        return None

    def _placements(self, cascades: Sequence[Cascade], cost: CostModel) -> list[Cascade]:
        if in_cells(cost):
            return best_placements(cascades, cost)
        if self.topology:
            return placed_on_few_groups(cascades, cost)
        return within_memory(cascades, placements(cascades, cost, topology=False), cost)
