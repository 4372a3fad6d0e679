"""``stages-adaptis``: stages and where they lie by AdaPtis' joint search (``arachnec.planning.stage_planners``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass, Scope
from arachnec.passes.stages import cut_by
from arachnec.planning.stage_planners import adaptis_stages


@dataclass(frozen=True)
class StagesAdaptis(Pass):
    """Cut the trained stage into stages, several a rank where that is faster, and say where each lies.

    Partition, placement and schedule are searched for together, on what the cost model says of every block class and
    every kind of node (``profile`` is that of ``annotate``). ``schedule-pipeline{schedule=planned}`` takes stages where
    they lie.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    profile: str | None = None

    def run(self, module: Module) -> Module:
        return cut_by(adaptis_stages, module, self.profile)
