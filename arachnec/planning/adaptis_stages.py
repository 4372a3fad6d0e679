"""AdaPtis' joint search on a module: cuts and places of stages. In: costed layers. Out: stages with a place.

Ranks are cut into runs; a pipeline has one rank of each, or one group that shares a clip. For every number of runs the
search's seeds are evaluated; from the best number on it repairs bottlenecks. Runs have the speed and the memory of
their nodes' kind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Stage
from arachnec.pipelining.errors import FitsNowhere
from arachnec.pipelining.pipeline_model import PipelineInstance
from arachnec.pipelining.pipeline_search import FoundPlan, find_plan
from arachnec.planning.layer_costs import CostedLayers
from arachnec.planning.stage_cuts import parts_of

TRIES = 60  # repairs of each of the best seeds
ROUNDS = 3  # micro-batches a rank that the search looks at; those beyond add what the busiest rank takes for them

Runs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Joint:
    """A plan of ``runs`` of ranks, and the step that it promises: all micro-batches and the gradients' all-reduce."""

    runs: Runs
    degree: int
    instance: PipelineInstance
    search: FoundPlan
    step: float


def adaptis_stages(layers: CostedLayers, stage: Stage) -> tuple[Stage, ...]:
    """The stages of the best plan, each with its ``place``. Raises UserError where nothing fits."""
    plan = joint_plan(layers)
    sizes, placement = plan.search.plan.sizes, plan.search.plan.placement
    parts = parts_of(stage, list(accumulate(sizes))[:-1])
    places = (plan.runs[run] for run in placement)
    return tuple(
        replace(part, attrs=part.attrs.updated(place=place)) for part, place in zip(parts, places, strict=True)
    )


def joint_plan(layers: CostedLayers) -> Joint:
    world, count = layers.cost.cluster.world, len(layers.parts)
    ranks = [p for p in range(1, min(world, count) + 1) if world % p == 0]
    seeds = [plan for p in ranks for plan in _least_degree(layers, p)]
    if not seeds:
        raise UserError(FitsNowhere(None, count, world))
    best = min(seeds, key=lambda plan: plan.step)
    return min(best, _searched(layers, best.runs, best.degree, best.instance, TRIES), key=lambda plan: plan.step)


def _least_degree(layers: CostedLayers, ranks: int) -> list[Joint]:
    """Seeds alone, at the least degree that fits, without recomputation and with it."""
    size = layers.cost.cluster.world // ranks
    runs = tuple(tuple(range(first, first + size)) for first in range(0, ranks * size, size))
    for degree in (d for d in range(1, size + 1) if size % d == 0):
        fitting = []
        for recompute in (False, True):
            instance = _instance(layers, runs, degree, recompute)
            if sum(layer.state + layer.saved for layer in instance.layers) > sum(instance.memory):
                continue  # one micro-batch is too much for all ranks
            try:
                fitting.append(_searched(layers, runs, degree, instance, 0))
            except UserError:
                continue
        if fitting:
            return fitting
    return []


def _searched(layers: CostedLayers, runs: Runs, degree: int, instance: PipelineInstance, tries: int) -> Joint:
    searched = find_plan(instance, tries=tries)
    costs, plan = searched.performance, searched.plan
    looked_at = instance.micro_batches
    every = -(-layers.micro_batches * degree // len(runs[0]))
    beyond = max(0, every - looked_at) * max(costs.compute) / looked_at
    ends = [0, *accumulate(plan.sizes)]
    reduces = [0.0] * len(runs)
    for stage, run in enumerate(plan.placement):
        reduces[run] += layers.all_reduce(ends[stage], ends[stage + 1], runs[run])
    return Joint(runs, degree, instance, searched, costs.makespan + beyond + max(reduces))


def _instance(layers: CostedLayers, runs: Runs, degree: int, recompute: bool) -> PipelineInstance:
    stages = len(runs)
    costs = layers.costs(degree, recompute, stages)
    replicas = len(runs[0]) // degree
    count = min(-(-layers.micro_batches // replicas), ROUNDS * stages)
    running = layers.running(degree, recompute)
    size = max((c.output for c in costs), default=0.0)
    neighbours = [layers.handoff(a[0], b[0], size) for a in runs for b in runs if a != b]
    slowest = max(neighbours, default=0.0)
    return PipelineInstance(
        costs,
        count,
        tuple(1 / layers.cost.devices.slowdown(run) for run in runs),
        tuple(layers.limit(run) - running for run in runs),
        bandwidth=size / slowest if slowest else float("inf"),
    )
