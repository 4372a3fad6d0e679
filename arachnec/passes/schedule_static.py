"""The fixed layouts that others train with, as schedules over the same cascades and costs.

* ``data-parallel``: every micro-batch on as few GPUs as hold it, dealt out in turn as they arrive (Open-Sora).
* ``one-degree``: the same degree for everything (DeepSpeed-Ulysses with a fixed group), the GPUs cut into groups of
  that size, and the longest micro-batch first onto the group that is free first.

An encoder runs where its train cascade will, right before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import counted, user_error
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.planning.formulate import problem_of, with_schedule
from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.static_layouts import at_least, best_one_degree, deal


@dataclass(frozen=True)
class ScheduleStatic(Pass):
    """A fixed layout.

    ``degree`` is the one degree; by default every one is tried and the best kept, so that this is a baseline and not a
    straw man. A cascade that this degree does not hold or that does not allow it takes the next larger that does, else
    the largest it has.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    policy: Literal["one-degree", "data-parallel"] = "one-degree"
    degree: int | None = None

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        world = cost.cluster.world
        if self.degree is not None and not 1 <= self.degree <= world:
            raise user_error(
                f"`schedule-static{{degree={self.degree}}}` on a cluster of {counted(world, 'GPU')}",
                help=f"give a degree from 1 to {world}",
            )
        problem = problem_of(module, cost)
        return with_schedule(module, cost, problem, self._schedule(problem))

    def _schedule(self, problem: Problem) -> Schedule:
        if self.policy == "data-parallel":
            return deal(problem, at_least(problem, self.degree or 1), in_turn=True)
        if self.degree is not None:
            return deal(problem, at_least(problem, self.degree), in_turn=False)
        return best_one_degree(problem)
