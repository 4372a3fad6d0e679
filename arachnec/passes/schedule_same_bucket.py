"""``schedule-same-bucket``: one bucket at a time on all GPUs, as NeMo trains video models.

``arachnec.planning.baselines.greedy`` has the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import counted, user_error
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.planning.baselines.greedy import bucket_by_bucket
from arachnec.planning.formulate import problem_of, with_schedule


@dataclass(frozen=True)
class ScheduleSameBucket(Pass):
    """``degree`` is the one degree; by default every one is tried and the best kept.

    A bucket that this degree does not hold takes the next larger that does.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    degree: int | None = None

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        world = cost.cluster.world
        if self.degree is not None and not 1 <= self.degree <= world:
            raise user_error(
                f"`schedule-same-bucket{{degree={self.degree}}}` on a cluster of {counted(world, 'GPU')}",
                help=f"give a degree from 1 to {world}",
            )
        problem = problem_of(module, cost)
        schedule = bucket_by_bucket(module, problem, self.degree)
        return with_schedule(module, cost, problem, schedule)
