"""``lower``: a placed module to one instruction list per rank (``arachnec.lowering.programs``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.nodes import (
    Level,
    Module,
)
from arachnec.lowering.programs import lower
from arachnec.passes.infra.base import Pass


@dataclass(frozen=True)
class Lower(Pass):
    """Instruction lists per rank from a placed module."""

    needs: ClassVar[Level] = Level.PLACED
    gives: ClassVar[Level] = Level.LOWERED

    def run(self, module: Module) -> Module:
        return lower(module)
