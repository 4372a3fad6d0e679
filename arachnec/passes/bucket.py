"""``bucket``: gradient all-reduces in buckets that overlap the last backwards (``arachnec.lowering.buckets``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.nodes import Level, Module
from arachnec.lowering.buckets import with_buckets
from arachnec.passes.infra.base import CountFromZero, Pass


@dataclass(frozen=True)
class Bucket(Pass):
    """Buckets for the gradient all-reduces: the fewest layers of ``mib`` MiB or more each; without it as the costs say.

    With ``reverse`` the plan is reversed in time where its all-reduces then end earlier.
    """

    needs: ClassVar[Level] = Level.PLACED
    gives: ClassVar[Level] = Level.PLACED
    mib: CountFromZero | None = None
    reverse: bool = True

    def run(self, module: Module) -> Module:
        if module.cluster is None or module.level is not Level.PLACED:  # the programs of a lowered one have theirs
            return module
        return with_buckets(module, self.mib, self.reverse)
