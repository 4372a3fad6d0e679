"""``schedule-dynamic-cp``: dynamic context parallelism as Megatron-Core schedules it.

``arachnec.planning.baselines.greedy`` has the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Count, Pass
from arachnec.planning.baselines.greedy import in_dynamic_rounds
from arachnec.planning.formulate import problem_of, with_schedule


@dataclass(frozen=True)
class ScheduleDynamicCp(Pass):
    """``tokens`` is the most tokens of a sequence per GPU; by default the memory decides."""

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    tokens: Count | None = None

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        problem = problem_of(module, cost)
        schedule = in_dynamic_rounds(module, problem, self.tokens)
        return with_schedule(module, cost, problem, schedule)
