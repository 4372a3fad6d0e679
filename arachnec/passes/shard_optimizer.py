"""Deal the optimizer's state out over the ranks that hold equal parameters, where copies of it would crowd the device.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.1: each parameter's moments and master copy lie on one rank,
which updates it and hands the result round. Parameters and gradients stay whole on every rank, so that cascades of any
degree on any ranks need nothing from the others while they run; the step moves once more the bytes of the parameters.

With the state known, the gradients' precision is too: fp32 where it fits (``arachnec.planning.gradient_precision``).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar

from arachnec.ir.nodes import Level, Module, Stage, quantity
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import gib
from arachnec.ir.values import Quantity
from arachnec.passes.infra.base import Pass, Scope
from arachnec.passes.schedule_pipeline import SchedulePipeline
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.pipeline_orders import stages_each

CROWDED = 0.5  # of the device's memory, taken by state alone


@dataclass(frozen=True)
class ShardOptimizer(Pass):
    """Deal the optimizer's state out where its copies would take more than half of a device.

    Over all ranks; of parameters in cells over the cells, beside each cell's own dealing out; of a stage of a pipeline
    over the ranks that hold the stage.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    together: int = field(default=1, init=False, compare=False, repr=False)  # stages of a pipeline on one rank

    def informed(self, following: tuple[Pass, ...]) -> ShardOptimizer:
        schedule = next((step for step in following if isinstance(step, SchedulePipeline)), None)
        informed = copy.copy(self)
        if schedule is not None:
            object.__setattr__(informed, "together", stages_each(schedule.schedule, schedule.v))
        return informed

    def run(self, module: Module) -> Module:
        return with_gradient_precision(_sharded(module, self.together))


def _sharded(module: Module, together: int) -> Module:
    if module.cluster is None or module.cluster.world < 2:
        return module
    parts = sorted((gib(stage.attrs.get("state")) for stage in module.stages if "part_of" in stage.attrs), reverse=True)
    whole = sum(gib(stage.attrs.get("state")) for stage in module.stages if "part_of" not in stage.attrs)
    if whole + sum(parts[:together]) <= CROWDED * module.cluster.memory:
        return module
    return spread(module, together)


def spread(module: Module, together: int = 1) -> Module:
    """The optimizer's state dealt out over all ranks that hold equal parameters, ``together`` stages on each."""
    assert module.cluster is not None
    world, parts = module.cluster.world, sum("part_of" in stage.attrs for stage in module.stages)
    pipeline = parts // together or 1
    return replace(module, stages=tuple(_dealt_out(stage, world, pipeline) for stage in module.stages))


def _dealt_out(stage: Stage, world: int, pipeline: int) -> Stage:
    if not stage.trained or "optimizer" not in stage.attrs or "sharded" in stage.attrs:
        return stage
    cell = cell_of(stage) or 1
    ranks = world // (pipeline if "part_of" in stage.attrs else cell)
    if ranks < 2:
        return stage
    spared = quantity(stage.attrs["optimizer"]) / cell * (1 - 1 / ranks)
    state = Quantity(quantity(stage.attrs["state"]) - spared, "GiB")
    return replace(stage, attrs=stage.attrs.updated(state=state, sharded=ranks))
