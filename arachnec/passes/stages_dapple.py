"""``stages-dapple``: stages and their replicas by DAPPLE's planner (``arachnec.planning.stage_planners``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Count, Pass, Scope
from arachnec.passes.stages import cut_by
from arachnec.pipelining.profile_file import read_profile_file
from arachnec.planning.stage_planners import dapple_stages


@dataclass(frozen=True)
class StagesDapple(Pass):
    """Cut the trained stage, and give every stage a number of ranks: the plan of least latency by DAPPLE's formula.

    Layers take what the cost model says (``profile`` is that of ``annotate``), or what a file in DAPPLE's format says,
    ``layers``, whose times and sizes are for ``batch`` clips.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    profile: str | None = None
    layers: str | None = None
    batch: Count = 1

    def __post_init__(self) -> None:
        if self.batch != 1 and self.layers is None:
            raise ValueError("batch is that of the file `layers`, and there is none")

    def run(self, module: Module) -> Module:
        given = None if self.layers is None else read_profile_file(Path(self.layers))
        return cut_by(partial(dapple_stages, profile=given, batch=self.batch), module, self.profile)
