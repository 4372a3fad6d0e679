"""``segment``: requests become chains of cascades (``planning.sampling.segments``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Count, Pass
from arachnec.planning.sampling.requests import segmented


@dataclass(frozen=True)
class Segment(Pass):
    """Each request's steps in runs that its models take without a border.

    ``length`` is the most steps of a segment that a switch may end, ``longest`` of one that it cannot; without it those
    are whole, and a scheduler cuts them where that pays. At most ``batch`` equal requests take their steps together.
    With ``models`` 1 the first model takes all steps.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.PARTITIONED

    length: Count = 5
    longest: Count | None = None
    batch: Count = 1
    models: Count = 2

    def run(self, module: Module) -> Module:
        return segmented(module, length=self.length, longest=self.longest, batch=self.batch, models=self.models)
