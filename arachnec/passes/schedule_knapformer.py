"""Bags of GPUs of fixed sizes, filled greedily to equal load, as KnapFormer balances (arXiv 2508.06001).

The GPUs are cut into bags; a sequence runs in one bag, shared by its GPUs. Longest first, every sequence goes to the
bag that would be done with it first. `docs/rivals.md` says what differs from the original.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Level, Module
from arachnec.passes.base import Pass
from arachnec.passes.bound import lower_bound
from arachnec.passes.cost import CostModel
from arachnec.passes.scheduling.groups import in_rounds, least_loaded, power_sizes, sinks_of, ticks_at
from arachnec.passes.scheduling.module import problem_of, scheduled
from arachnec.passes.scheduling.problem import Problem, Schedule, Solution


@dataclass(frozen=True)
class BadBags(Diagnostic):
    title: ClassVar[str] = "bags of {bags} GPUs on a cluster of {world}"
    help: ClassVar[str] = "give sizes of at least 1 that sum to at most {world}"
    bags: str
    world: int


@dataclass(frozen=True)
class BagsTooSmall(Diagnostic):
    title: ClassVar[str] = "no bag of {bags} GPUs holds the longest clip"
    help: ClassVar[str] = "one bag must have at least {least} GPUs"
    bags: str
    least: int


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
            raise UserError(BadBags(None, written, world))
        problem = problem_of(module, cost)
        schedule = best_bags(problem, [self.bags] if self.bags else cuts(world))
        if schedule is None:
            least = max(job.choices[0].degree for job in problem.jobs)
            raise UserError(BagsTooSmall(None, written, least))
        bound = lower_bound(problem)
        return scheduled(module, cost, problem, Solution(schedule, bound, bound, schedule.makespan(problem) <= bound))


def best_bags(problem: Problem, candidates: list[tuple[int, ...]]) -> Schedule | None:
    """The shortest schedule over these cuts of the GPUs; None where every one is too small for some job."""
    ticks = ticks_at(problem, sinks_of(problem), {size for sizes in candidates for size in sizes})
    found = [least_loaded(ticks, sizes) for sizes in candidates]
    tried = [in_rounds(problem, [groups]) for groups in found if groups is not None]
    return min(tried, key=lambda schedule: schedule.makespan(problem), default=None)


def cuts(gpus: int) -> list[tuple[int, ...]]:
    """Equal bags of every power of two, and one, a quarter, half and three quarters of the GPUs in larger bags."""
    return list(dict.fromkeys(_cuts(gpus)))


def _cuts(gpus: int) -> Iterator[tuple[int, ...]]:
    sizes = power_sizes(gpus)
    for large in sizes:
        yield (large,) * (gpus // large)
        for small in sizes:
            if small >= large:
                break
            for count in sorted({1, *(gpus * part // (4 * large) for part in (1, 2, 3))} - {0}):
                rest = gpus - count * large
                if rest >= small:
                    yield (large,) * count + (small,) * (rest // small)
