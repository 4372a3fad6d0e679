"""``schedule-knapformer``: bags of GPUs of fixed sizes, as KnapFormer balances (``planning.baselines.knapformer``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.planning.baselines.greedy import best_bags, cuts
from arachnec.planning.formulate import problem_of, with_schedule


@dataclass(frozen=True)
class ScheduleKnapformer(Pass):
    """``bags`` are the sizes; by default many cuts of the cluster into one or two sizes are tried and the best kept."""

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    bags: tuple[int, ...] = ()

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        world = cost.cluster.world
        written = ", ".join(map(str, self.bags))
        if self.bags and (min(self.bags) < 1 or sum(self.bags) > world):
            raise user_error(
                f"bags of {written} GPUs on a cluster of {world}",
                help=f"give sizes of at least 1 that sum to at most {world}",
            )
        problem = problem_of(module, cost)
        schedule = best_bags(problem, [self.bags] if self.bags else cuts(world))
        if schedule is None:
            widest = max(job.choices[0].degree for job in problem.jobs)
            raise user_error(
                f"no bag of {written} GPUs holds the longest clip", help=f"one bag must have at least {widest} GPUs"
            )
        return with_schedule(module, cost, problem, schedule)
