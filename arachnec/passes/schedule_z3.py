"""Degrees and start times for all cascades: a bound, heuristics in milliseconds, then Z3 improves and proves.

1. A lower bound that holds for every schedule (``bound``).
2. The best packing in aligned blocks, list schedule or fixed layout (``block_packing``, ``list_schedule``).
3. Large-neighbourhood search on the packing, with Z3 on two blocks where it stalls (``large_neighbourhood``); annealing
   where jobs wait for others or blocks waste GPUs (``annealing``).
4. Of a few jobs that do not wait, the shortest packing (``exact_packing``).
5. Small problems go to Z3 whole, by bisection between bound and incumbent, until the incumbent is proved optimal or the
   budget is spent (``z3_assignment``; with precedence ``z3_schedule``). Of larger ones with precedence Z3
   improves the tail (``tail``), taking turns with annealing.

The module then says makespan, bound, and whether the makespan was proved optimal. ``bound`` stays the bound of step 1
unless Z3 excluded more than it: then it is the shortest makespan not excluded, which equals the makespan where that is
proved optimal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module
from arachnec.ir.stage_sizes import times_of
from arachnec.passes.infra.base import Duration, Pass
from arachnec.planning.candidates import few_layouts, named_layouts
from arachnec.planning.formulate import problem_of, scheduled
from arachnec.planning.mixed_bound import mixed_bound
from arachnec.planning.mixed_nodes import best_on_mixed
from arachnec.planning.placed_search import Measure, Placing, best_placed, placing_is_quick
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import Clock
from arachnec.solver.problem import TICKS, Problem, Schedule, Solution
from arachnec.solver.search import TRIES, TRIES_OF_FEW, first_nested, repack, solve

DEFAULT_BUDGET = Duration(2000.0)
MIXED_SHARE = 0.3  # of the budget, for schedules for fewer GPUs where nodes differ
LEAST_PLACING = 0.1  # of the budget
BEFORE_PLACING = 0.3  # of the budget; the rest goes on with placed makespans, where those are longer
PLACINGS = 1.3  # times what placing the first of many cascades took: set aside for placing the last
LATE = 1.02  # times the bound: a placed schedule that ends later is compared with fixed layouts
GROUPS_SHARE = 0.25  # of what is left then, for an integer program over groups


@dataclass(frozen=True)
class ScheduleZ3(Pass):
    """The default scheduler.

    ``budget`` limits the wall time of the search; 0ms gives the best heuristic at once. ``steps`` limits it by a count
    of work instead, so that equal seeds and steps give equal schedules on any machine, however loaded.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    budget: Duration = DEFAULT_BUDGET
    seed: int = 0
    steps: int | None = None

    def run(self, module: Module) -> Module:
        started = time.perf_counter()
        cost = CostModel(module)
        problem = problem_of(module, cost)
        # measured cascades take as long anywhere
        anywhere = not cost.devices.kinds and all(map(times_of, module.cascades))
        if anywhere:
            return scheduled(module, cost, problem, solve(problem, Clock(started, self.budget, self.steps), self.seed))
        if not cost.devices.kinds and not placing_is_quick(problem):
            return scheduled(module, cost, problem, self._on_nodes(module, cost, problem, started))
        share = BEFORE_PLACING if placing_is_quick(problem) else 1.0
        found = solve(problem, Clock(started, self.budget * share, self.steps), self.seed)
        if cost.devices.kinds and problem.jobs:
            until = Clock(started, self.budget * (share + MIXED_SHARE), self.steps)
            schedule = best_on_mixed(module, cost, problem, found.schedule, lambda: until.left() <= 0)
            found = replace(found, schedule=schedule, proved=False)
        # of devices that differ the problem, and so its bound, counts all as the fastest
        real = mixed_bound(module, cost, problem, found.area_bound) if cost.devices.kinds else found.area_bound
        # whatever the search took, placing gets something
        least = time.perf_counter() - started + self.budget * LEAST_PLACING / 1e3
        clock = Clock(started, max(self.budget, least * 1e3), self.steps)
        schedule = best_placed(
            module,
            cost,
            problem,
            replace(found, bound=max(found.bound, real), area_bound=real),
            seed=self.seed,
            steps=max(TRIES, TRIES_OF_FEW * 2 ** min(len(problem.jobs), 20)) if self.steps is None else self.steps,
            seconds=0.0 if self.steps is not None else max(0.0, clock.left()) * GROUPS_SHARE / 1e3,
            stop=lambda: clock.left() <= 0,
        )
        return scheduled(module, cost, problem, _with(found, schedule, problem))

    def _on_nodes(self, module: Module, cost: CostModel, problem: Problem, started: float) -> Solution:
        """Of many cascades: with degrees whose blocks nest, so that it can be placed as it is.

        Two placements are measured, of the first packing and of the last; the first one's time is set aside for the
        last. Between them come layouts that others train with, and after them, where that is late and time is left,
        those of one degree.
        """
        bound = lower_bound(problem)
        clock = Clock(started, self.budget, self.steps)
        inside, first = first_nested(problem, cost.cluster.gpus, bound, clock)
        whole = inside.whole(first.schedule)
        if not clock.any_left():
            return Solution(whole, bound, bound, whole.makespan(problem) <= bound, first.ms)
        trial = Placing(Measure(module, cost, problem), whole, clock.left)
        # what others train with is judged first, for half of the budget at most
        named = named_layouts(module, cost, problem, self.seed, 0.0)
        while clock.left() - trial.slowest * PLACINGS > self.budget / 2 and (layout := next(named, None)) is not None:
            trial.offer(layout)
        until = replace(clock, budget=clock.budget - trial.slowest * PLACINGS)
        if first.options is not None and first.packed is not None:
            found = repack(inside.problem, first.options, first.packed, first.schedule, bound, until, self.seed)
            trial.offer(inside.whole(found))
        if trial.length - trial.measure.ending.least > LATE * bound / TICKS:
            layouts = few_layouts(problem)
            while trial.slowest * PLACINGS <= clock.left() and (layout := next(layouts, None)) is not None:
                trial.offer(layout)
        return Solution(trial.best, bound, bound, trial.best.makespan(problem) <= bound, first.ms)


def _with(found: Solution, schedule: Schedule, problem: Problem) -> Solution:
    """The solution with another schedule in the place of its own."""
    if schedule == found.schedule:
        return found
    return replace(found, schedule=schedule, proved=schedule.makespan(problem) <= found.bound)
