"""``schedule-genetic``: degrees and priorities by a genetic search, as Arachne plans.

``arachnec.planning.baselines.genetic`` has the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.planning.baselines.genetic import ELITE, decode, evolve
from arachnec.planning.formulate import problem_of, with_schedule


@dataclass(frozen=True)
class ScheduleGenetic(Pass):
    """``generations`` of ``population`` individuals; equal seeds give equal schedules."""

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    generations: int = 60
    population: int = 40
    seed: int = 0

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        problem = problem_of(module, cost)
        best = evolve(problem, cost.cluster, max(0, self.generations), max(ELITE + 1, self.population), self.seed)
        schedule = decode(problem, cost.cluster, best)[0]
        return with_schedule(module, cost, problem, schedule)
