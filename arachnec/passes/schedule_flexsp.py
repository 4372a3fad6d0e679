"""``schedule-flexsp``: heterogeneous sequence-parallel groups by integer programming

``arachnec.planning.baselines.flexsp`` has the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Count, Duration, Pass
from arachnec.planning.baselines.flexsp import DEFAULT_BUCKETS, DEFAULT_MICRO_BATCHES, solved
from arachnec.planning.formulate import problem_of, with_schedule
from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.static_layouts import best_one_degree

DEFAULT_LIMIT = Duration(2000.0)  # what the default scheduler has


@dataclass(frozen=True)
class ScheduleFlexsp(Pass):
    """``limit`` is the wall time of all integer programs together, ``buckets`` the most buckets of one program, and
    ``micro_batches`` the most rounds.

    One degree for all is among the layouts that the program describes, so where HiGHS finds nothing better in its time
    the best such layout stands.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    limit: Duration = DEFAULT_LIMIT
    buckets: Count = DEFAULT_BUCKETS
    micro_batches: Count = DEFAULT_MICRO_BATCHES

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        problem = problem_of(module, cost)
        schedule = self._schedule(problem)
        return with_schedule(module, cost, problem, schedule)

    def _schedule(self, problem: Problem) -> Schedule:
        candidates = [best_one_degree(problem), *solved(problem, self.limit / 1e3, self.buckets, self.micro_batches)]
        return min(candidates, key=lambda schedule: schedule.makespan(problem))
