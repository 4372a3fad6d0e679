"""``lower``: a placed module to one instruction list per rank (``arachnec.lowering.programs``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from arachnec.ir.nodes import Level, Module
from arachnec.lowering.programs import lower
from arachnec.passes.infra.base import Pass


@dataclass(frozen=True)
class Lower(Pass):
    """Instruction lists per rank from a placed module.

    ``attention`` is the kernel family for cascades that name none; None means the best of the cluster's device.
    """

    attention: Literal["flash2", "flash3", "cudnn", "efficient", "math", "cpu-flash"] | None = None
    needs: ClassVar[Level] = Level.PLACED
    gives: ClassVar[Level] = Level.LOWERED

    def run(self, module: Module) -> Module:
        return lower(module, self.attention)
