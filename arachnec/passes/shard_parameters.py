"""Deal parameters, gradients and optimizer state of trained stages out over cells of ranks (``ir.parameter_cells``).

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.3; cells smaller than the world after Zhao et al., "PyTorch
FSDP" (arXiv 2304.11277), section 3.2.2, "hybrid sharding". docs/sharded_parameters.md says when it pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Cluster, Level, Module
from arachnec.ir.parameter_cells import cell_fits
from arachnec.passes.infra.base import Pass, Scope
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.layouts import in_cells


@dataclass(frozen=True)
class NoSuchCell(Diagnostic):
    title: ClassVar[str] = "`shard-parameters{{cell={cell}}}` on {nodes} x {gpus} ranks"
    help: ClassVar[str] = (
        "a cell divides the ranks of a machine, or holds whole machines and divides all ranks: {fitting}; `node` is a "
        "machine, `world` all"
    )
    cell: str
    nodes: int
    gpus: int
    fitting: str


@dataclass(frozen=True)
class ShardParameters(Pass):
    """Deal parameters, gradients and optimizer state out over cells of ranks, layer by layer.

    ``cell`` is how many ranks hold them together: a number, ``node`` for the devices of a machine, ``world`` for all.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    cell: str = "node"

    def run(self, module: Module) -> Module:
        if module.cluster is None:
            return module
        cell = self._size(module, module.cluster)
        if cell == 1:
            return module
        stages = tuple(in_cells(stage, cell) for stage in module.stages)
        return with_gradient_precision(replace(module, stages=stages))

    def _size(self, module: Module, cluster: Cluster) -> int:
        words = {"node": cluster.gpus, "world": cluster.world}
        size = words.get(self.cell, int(self.cell) if self.cell.isdecimal() else 0)
        if not cell_fits(size, cluster.nodes, cluster.gpus):
            sizes = (n for n in range(1, cluster.world + 1) if cell_fits(n, cluster.nodes, cluster.gpus))
            fitting = ", ".join(map(str, sizes))
            raise UserError(NoSuchCell(None, self.cell, cluster.nodes, cluster.gpus, fitting))
        return size
