"""One bucket at a time on all GPUs, as NeMo trains video models.

Every data-parallel rank draws its micro-batch from the same bucket, so that all take equally long; then all go on to
the next bucket. One context-parallel degree holds for the whole run. What is lost: GPUs for which a bucket has no
micro-batch left wait, and a bucket of few long clips keeps few of them busy. `docs/baselines.md` says what differs from
the original.
"""

from __future__ import annotations

from arachnec.ir.nodes import Module
from arachnec.solver.group_rounds import Group, chain_ticks, in_rounds, least_loaded, sinks_of, ticks_at
from arachnec.solver.problem import Problem, Schedule


def bucket_by_bucket(module: Module, problem: Problem, degree: int | None = None) -> Schedule:
    """The cascades of a module, those of one length at a time, at one degree or the best one."""
    buckets: dict[object, list[int]] = {}
    for sink in sinks_of(problem):
        cascade = module.cascades[sink]
        buckets.setdefault((cascade.stage, cascade.tokens, cascade.attrs.get("times")), []).append(sink)
    degrees = [degree] if degree else sorted({c.degree for job in problem.jobs for c in job.choices})
    tried = [one_bucket_at_a_time(problem, list(buckets.values()), width) for width in degrees]
    return min(tried, key=lambda schedule: schedule.makespan(problem))


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
