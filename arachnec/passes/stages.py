"""``stages``: the traced model as a pipeline of stages, runs of its blocks (``arachnec.planning.stage_cuts``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Level, Module, Stage
from arachnec.passes.infra.base import Pass, Scope
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.stage_count import fitting_stages
from arachnec.planning.stage_cuts import (
    CutsForOtherStages,
    balanced_cuts,
    demand_cuts,
    demand_cuttable,
    parts_of,
)


@dataclass(frozen=True)
class Stages(Pass):
    """Cut the trained stage into ``p`` stages of nearly equal work, or at ``cuts``: the first block of each later one.

    Without either, into the fewest stages that divide the ranks and leave room for the longest clip.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    p: int | None = None
    cuts: tuple[int, ...] | None = None

    def run(self, module: Module) -> Module:
        if module.level is not Level.TRACED:
            return module
        stages: list[Stage] = []
        for stage in module.stages:
            if not stage.trained or "part_of" in stage.attrs:
                stages.append(stage)
                continue
            demand_cuttable(stage)
            stages += parts_of(stage, self._cuts(module, stage))
        return with_gradient_precision(replace(module, stages=tuple(stages)))

    def _cuts(self, module: Module, stage: Stage) -> tuple[int, ...]:
        if self.cuts is None:
            return balanced_cuts(stage, self.p or fitting_stages(module, stage), module.clips)
        if self.p is not None and self.p != len(self.cuts) + 1:
            raise UserError(CutsForOtherStages(stage.span, len(self.cuts), len(self.cuts) + 1, self.p))
        demand_cuts(stage, self.cuts)
        return self.cuts
