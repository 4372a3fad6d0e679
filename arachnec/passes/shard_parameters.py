"""Deal parameters, gradients and optimizer state of trained stages out over cells of ranks (``ir.parameter_cells``).

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.3; cells smaller than the world after Zhao et al., "PyTorch
FSDP" (arXiv 2304.11277), section 3.2.2, "hybrid sharding". docs/sharded_parameters.md says when it pays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Cluster, Level, Module
from arachnec.ir.parameter_cells import cell_fits
from arachnec.passes.infra.base import Count, Pass, Scope
from arachnec.passes.schedule_pipeline import SchedulePipeline
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.layouts import in_cells
from arachnec.planning.pipeline_orders import ranks_of_stages
from arachnec.planning.pipeline_places import ranks_do_not_divide_error


@dataclass(frozen=True)
class ShardParameters(Pass):
    """Deal parameters, gradients and optimizer state out over cells of ranks, layer by layer.

    ``cell`` is how many ranks hold them together: a number, ``node`` for the devices of a machine, ``world`` for all.
    Of a model in stages ``world`` are the ranks of a stage. How many these are follows from ``stages_each``, the stages
    on one rank, from ``degrees``, or from ``pipeline``, the ranks of one pipeline, which the schedule says.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    cell: str = "node"
    stages_each: Count = 1
    degrees: tuple[Count, ...] | None = None
    pipeline: Count | None = None

    def informed(self, following: tuple[Pass, ...]) -> ShardParameters:
        schedule = next((step for step in following if isinstance(step, SchedulePipeline)), None)
        return self if schedule is None else replace(self, **schedule.place_options)

    def run(self, module: Module) -> Module:
        if module.cluster is None:
            return module
        cell = self._size(module, module.cluster)
        if cell == 1:
            return module
        stages = tuple(in_cells(stage, cell) for stage in module.stages)
        return with_gradient_precision(replace(module, stages=stages))

    def _size(self, module: Module, cluster: Cluster) -> int:
        parts = sum("part_of" in stage.attrs for stage in module.stages)
        said = self.stages_each, self.degrees, self.pipeline
        places = ranks_of_stages(cluster.world, parts, *said) if parts else (cluster.world,)
        ranks = math.gcd(*places)  # which cells must divide
        if not ranks:
            raise ranks_do_not_divide_error(cluster.world, self.pipeline or parts // self.stages_each)

        def fits(size: int) -> bool:
            return cell_fits(size, cluster.nodes, cluster.gpus) and ranks % size == 0

        words = {"node": min(ranks, cluster.gpus), "world": ranks}
        size = words.get(self.cell, int(self.cell) if self.cell.isdecimal() else 0)
        if size < 1 or not fits(size):
            fitting = ", ".join(str(size) for size in range(1, ranks + 1) if fits(size))
            stages = f", {ranks} of each stage" if parts else ""
            raise user_error(
                f"`shard-parameters{{cell={self.cell}}}` on {cluster.nodes} x {cluster.gpus} ranks{stages}",
                help=(
                    f"a cell divides the ranks of a machine, or holds whole machines and divides all ranks: {fitting}; "
                    "`node` is a machine, `world` all"
                ),
            )
        return size
