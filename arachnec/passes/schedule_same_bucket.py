"""One bucket at a time on all GPUs, as NeMo trains video models.

Every data-parallel rank draws its micro-batch from the same bucket, so that all take equally long; then all go on to
the next bucket. One context-parallel degree holds for the whole run. What is lost: GPUs for which a bucket has no
micro-batch left wait, and a bucket of few long clips keeps few of them busy. `docs/rivals.md` says what differs from
the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic, UserError, counted
from arachnec.ir.nodes import Level, Module
from arachnec.passes.base import Pass
from arachnec.passes.bound import lower_bound
from arachnec.passes.cost import CostModel
from arachnec.passes.scheduling.groups import Group, chain_ticks, in_rounds, least_loaded, sinks_of, ticks_at
from arachnec.passes.scheduling.module import problem_of, scheduled
from arachnec.passes.scheduling.problem import Problem, Schedule, Solution


@dataclass(frozen=True)
class BadBucketDegree(Diagnostic):
    title: ClassVar[str] = "`schedule-same-bucket{{degree={degree}}}` on a cluster of {gpus}"
    help: ClassVar[str] = "give a degree from 1 to {world}"
    degree: int
    gpus: str
    world: int


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
            raise UserError(BadBucketDegree(None, self.degree, counted(world, "GPU"), world))
        problem = problem_of(module, cost)
        schedule = bucket_by_bucket(module, problem, self.degree)
        bound = lower_bound(problem)
        return scheduled(module, cost, problem, Solution(schedule, bound, bound, schedule.makespan(problem) <= bound))


def bucket_by_bucket(module: Module, problem: Problem, degree: int | None = None) -> Schedule:
    """The cascades of a module, those of one length at a time, at one degree or the best one."""
    buckets: dict[object, list[int]] = {}
    for sink in sinks_of(problem):
        cascade = module.cascades[sink]
        buckets.setdefault((cascade.stage, cascade.tokens, cascade.attrs.get("times")), []).append(sink)
    degrees = [degree] if degree else sorted({c.degree for job in problem.jobs for c in job.choices})
    tried = [one_bucket_at_a_time(problem, list(buckets.values()), each) for each in degrees]
    return min(tried, key=lambda found: found.makespan(problem))


def one_bucket_at_a_time(problem: Problem, buckets: list[list[int]], degree: int) -> Schedule:
    """One round per bucket, its chains dealt to equal groups of at least ``degree`` GPUs."""
    rounds: list[list[Group]] = []
    for sinks in buckets:
        width = degree
        while any(chain_ticks(problem, sink, width) is None for sink in sinks):
            width += 1
        groups = least_loaded(ticks_at(problem, sinks, [width]), [width] * (problem.gpus // width))
        assert groups is not None
        rounds.append(groups)
    return in_rounds(problem, rounds)
