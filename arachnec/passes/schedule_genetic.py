"""``schedule-genetic``: degrees and priorities by a genetic search, as Arachne plans.

``arachnec.planning.baselines.genetic`` has the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import AtLeast, CountFromZero, Pass
from arachnec.planning.baselines.genetic import ELITE, decode, evolve
from arachnec.planning.formulate import problem_of, with_schedule


@dataclass(frozen=True)
class ScheduleGenetic(Pass):
    """``generations`` of ``population`` individuals, the best two survive; equal seeds give equal schedules."""

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    generations: CountFromZero = 60
    population: Annotated[int, AtLeast(ELITE + 1)] = 40
    seed: int = 0

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        problem = problem_of(module, cost)
        best = evolve(problem, cost.cluster, self.generations, self.population, self.seed)
        schedule = decode(problem, cost.cluster, best)[0]
        return with_schedule(module, cost, problem, schedule)
