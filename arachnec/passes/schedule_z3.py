"""Degrees and start times for all cascades: a bound, heuristics in milliseconds, then a portfolio improves and proves.

1. A lower bound that holds for every schedule (``solver.bound``).
2. A first schedule: a packing in aligned blocks, or a list schedule.
3. The baselines' layouts are tried. Then improvers share one incumbent and the budget (``solver.portfolio``): large
   neighbourhoods, annealing, and Z3 on the whole problem.
4. Where placing changes what a schedule is worth, it is judged by its placed and simulated iteration, in the pipeline
   that really follows (``planning.placed_search``).

The module then says makespan, bound, and whether the makespan was proved optimal. ``bound`` stays the bound of step 1
unless Z3 excluded more than it: then it is the shortest makespan not excluded, which equals the makespan where that is
proved optimal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.cost.table import Rows
from arachnec.ir.nodes import Level, Module
from arachnec.ir.stage_sizes import times_of
from arachnec.passes.bucket import Bucket
from arachnec.passes.infra.base import CountFromZero, Duration, InformedPass
from arachnec.passes.lower import Lower
from arachnec.passes.place import Place
from arachnec.planning.formulate import problem_of, scheduled
from arachnec.planning.placed_objective import Following
from arachnec.planning.placed_search import solve_placed
from arachnec.solver.budget import Clock
from arachnec.solver.search import solve

# A thousandth of the 10 to 60 minutes between two checkpoints; most gaps halve only once more in ten times as long.
DEFAULT_BUDGET = Duration(2000.0)


@dataclass(frozen=True)
class ScheduleZ3(InformedPass):
    """The default scheduler. In a layout of stages `schedule-stages` runs in its place.

    ``budget`` limits the wall time of the search; 0ms gives the best heuristic at once. ``steps`` limits it by a count
    of work instead, about a millisecond each, so that equal seeds and steps give equal schedules on any machine,
    however loaded. Without ``baselines`` the layouts that others train with are not tried, so that a comparison with
    them says what the search finds by itself.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    budget: Duration = DEFAULT_BUDGET
    seed: int = 0
    steps: CountFromZero | None = None
    baselines: bool = True

    @property
    def following_settings(self) -> Following:
        """The settings of the passes that follow; the defaults of those that do not."""
        place = next((step for step in self.following if isinstance(step, Place)), Place())
        bucket = next((step for step in self.following if isinstance(step, Bucket)), None)
        lowered = any(isinstance(step, Lower) for step in self.following)
        return Following(
            topology=place.topology,
            buckets=bucket is not None or not lowered,
            mib=bucket.mib if bucket is not None else None,
            reversible=bucket.reverse if bucket is not None else not lowered,
        )

    def run(self, module: Module) -> Module:
        return self.run_for_comparison(module, Rows())

    def run_for_comparison(self, module: Module, rows: Rows) -> Module:
        clock = Clock(time.perf_counter(), self.budget, self.steps)
        cost = CostModel(module, rows)
        problem = problem_of(module, cost)
        # measured cascades take as long anywhere
        if not problem.jobs or (not cost.devices.kinds and all(map(times_of, module.cascades))):
            return scheduled(module, cost, problem, solve(problem, clock, self.seed))
        answer = solve_placed(
            module,
            cost,
            problem,
            clock,
            seed=self.seed,
            following=self.following_settings,
            baselines=self.baselines,
        )
        return scheduled(module, cost, problem, answer)
