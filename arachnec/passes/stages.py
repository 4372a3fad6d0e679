"""``stages``: the traced model as a pipeline of stages, runs of its blocks (``arachnec.planning.stage_cuts``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Level, Module, Stage
from arachnec.passes.annotate import Annotate
from arachnec.passes.infra.base import Pass, Scope
from arachnec.passes.partition import Partition
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.stage_count import fitting_stages
from arachnec.planning.stage_cuts import balanced_cuts, demand_cuts, demand_cuttable, on_ranks, parts_of
from arachnec.planning.stage_planners import CostedLayers, costed_layers


def cut_by(planner: Callable[[CostedLayers, Stage], tuple[Stage, ...]], module: Module, profile: str | None) -> Module:
    """The module with the stages that a planner makes of what the trained stage's layers cost.

    They cost what cascades of the default's micro-batches would, by ``annotate{profile}``.
    """

    def costed(iteration: Module) -> Module:
        return Annotate(profile=profile).run(Partition(split_backward=True).run(with_gradient_precision(iteration)))

    def parts(stage: Stage) -> tuple[Stage, ...]:
        if not stage.trained:
            return (stage,)
        demand_cuttable(stage)
        return planner(costed_layers(module, stage, costed), stage)

    if module.level is not Level.TRACED:
        return module
    stages = tuple(part for stage in module.stages for part in parts(stage))
    return with_gradient_precision(replace(module, stages=stages))


@dataclass(frozen=True)
class Stages(Pass):
    """Cut the trained stage into ``p`` stages of nearly equal work, or at ``cuts``: the first block of each later one.

    Without either, into the fewest stages that divide the ranks and leave room for the longest clip. ``replicas`` is
    on how many ranks each stage lies, in the order of the ranks, where they are not to be equally many.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    p: int | None = None
    cuts: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None

    def run(self, module: Module) -> Module:
        if module.level is not Level.TRACED:
            return module
        stages: list[Stage] = []
        for stage in module.stages:
            if not stage.trained:
                stages.append(stage)
                continue
            demand_cuttable(stage)
            parts = parts_of(stage, self._cuts(module, stage))
            stages += parts if self.replicas is None else on_ranks(parts, self.replicas, module)
        return with_gradient_precision(replace(module, stages=tuple(stages)))

    def _cuts(self, module: Module, stage: Stage) -> tuple[int, ...]:
        if self.cuts is None:
            return balanced_cuts(stage, self._count(module, stage), module.clips)
        if self.p is not None and self.p != len(self.cuts) + 1:
            raise user_error(
                f"{len(self.cuts)} cuts make {len(self.cuts) + 1} stages, and p is {self.p}",
                help="give `cuts` or `p`",
                span=stage.span,
            )
        demand_cuts(stage, self.cuts)
        return self.cuts

    def _count(self, module: Module, stage: Stage) -> int:
        return fitting_stages(module, stage) if self.p is None else self.p
