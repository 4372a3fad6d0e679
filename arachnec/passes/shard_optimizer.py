"""Deal the optimizer's state out over the ranks where a copy on every rank would crowd the device.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.1: each parameter's moments and master copy lie on one rank,
which updates it and hands the result round. Parameters and gradients stay whole on every rank, so that cascades of any
degree on any ranks need nothing from the others while they run; the step moves once more the bytes of the parameters.

The stages of a pipeline lie on ranks of their own: each is dealt out over the ranks that hold it.

With the state known, the gradients' precision is too: fp32 where it fits (``arachnec.planning.gradient_precision``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.nodes import Cluster, Level, Module, Stage, integers, quantity
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import gib
from arachnec.ir.state_placement import place
from arachnec.passes.infra.base import Count, Pass, Scope
from arachnec.passes.schedule_pipeline import SchedulePipeline
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.pipeline_orders import ranks_of_stages

CROWDED = 0.5  # of the device's memory, taken by state alone


@dataclass(frozen=True)
class ShardOptimizer(Pass):
    """Deal the optimizer's state out over all ranks where its copies would take more than half of a device.

    Of parameters in cells, over the cells, beside each cell's own dealing out. Of a model in stages, over the ranks of
    each stage. How many these are follows from ``stages_each``, the most stages on one rank, from ``degrees``, or from
    ``pipeline``, the ranks of one pipeline, which the schedule says.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    stages_each: Count = 1
    degrees: tuple[Count, ...] | None = None
    pipeline: Count | None = None

    def run(self, module: Module) -> Module:
        return with_gradient_precision(_sharded(module, self.stages_each, self.degrees, self.pipeline))

    def informed(self, following: tuple[Pass, ...]) -> ShardOptimizer:
        schedule = next((step for step in following if isinstance(step, SchedulePipeline)), None)
        return self if schedule is None else replace(self, **schedule.place_options)


def _sharded(module: Module, stages_each: int, degrees: tuple[int, ...] | None, pipeline: int | None) -> Module:
    if module.cluster is None or module.cluster.world < 2:
        return module
    if parts := [stage for stage in module.stages if "part_of" in stage.attrs]:
        ranks = ranks_of_stages(module.cluster.world, len(parts), stages_each, degrees, pipeline)
        return _sharded_stages(module, module.cluster, parts, stages_each, ranks)
    state = sum(quantity(stage.attrs["state"]) for stage in module.stages if "state" in stage.attrs)
    if state <= CROWDED * module.cluster.memory:
        return module
    return spread(module)


def spread(module: Module) -> Module:
    """The optimizer's state of every stage dealt out over all ranks that hold equal parameters: over all, or where
    parameters lie in cells over one of each."""
    assert module.cluster is not None
    world = module.cluster.world
    return replace(module, stages=tuple(_dealt_out(stage, world // (cell_of(stage) or 1)) for stage in module.stages))


def _sharded_stages(
    module: Module, cluster: Cluster, parts: Sequence[Stage], per_rank: int, ranks: Sequence[int]
) -> Module:
    """Where the fullest rank of the pipeline would be crowded; its stages are taken to be as large as the largest."""
    everywhere = sum(gib(stage.attrs.get("state")) for stage in module.stages if stage not in parts)
    if everywhere + per_rank * max(gib(stage.attrs.get("state")) for stage in parts) <= CROWDED * cluster.memory:
        return module
    placed = [integers(part.attrs["place"]) if "place" in part.attrs else None for part in parts]
    counts = [count if place is None else len(place) for count, place in zip(ranks, placed, strict=True)]
    dealt = {part.name: _dealt_out(part, count) for part, count in zip(parts, counts, strict=True)}
    return replace(module, stages=tuple(dealt.get(stage.name, stage) for stage in module.stages))


def _dealt_out(stage: Stage, ranks: int) -> Stage:
    if ranks < 2 or {"cell", "part_of"} <= set(stage.attrs):
        return stage
    if not stage.trained or "optimizer" not in stage.attrs or "sharded" in stage.attrs:
        return stage
    return place(stage, sharded=ranks)
