"""What a planned pipeline costs, taken apart: AdaPtis' performance model of a module (2509.23722, section 4).

In: a lowered module whose stages are a pipeline. Out: for every rank its compute, memory, messages and waiting; how
much of the messages is exposed; and what costs most.
"""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module
from arachnec.lowering.order import global_order
from arachnec.pipelining.pipeline_model import Performance, bottleneck_of
from arachnec.planning.cascade_ranks import arrival


def module_performance(module: Module, cost: CostModel) -> Performance:
    """Of every rank of the cluster, in ms and GiB.

    Compute is what its cascades take; messages are those that it sends. Exposed is how much earlier the last cascade
    would end if they were free, every rank's order kept.
    """
    ranks = range(cost.cluster.world)
    compute, messages = [0.0] * len(ranks), [0.0] * len(ranks)
    named = {cascade.name: cascade for cascade in module.cascades}
    for cascade in module.cascades:
        for rank in cascade.ranks:
            compute[rank] += cascade.end - cascade.start
        for source in (named[name] for name in cascade.inputs):
            messages[source.ranks[0]] += arrival(source, cascade, cost)
    makespan = _end(module, lambda source, cascade: arrival(source, cascade, cost))
    exposed = makespan - _end(module, lambda source, cascade: 0.0)
    values, nodes = Values(module), machines(cost.cluster)
    memory = tuple(high_water(values, program).total for program in module.programs)
    overfull = any(held > nodes[node_of(cost.cluster, rank)].memory for rank, held in enumerate(memory))
    speeds = [1 / cost.devices.slowdown((rank,)) for rank in ranks]
    return Performance(
        makespan,
        tuple(compute),
        memory,
        tuple(messages),
        tuple(makespan - busy for busy in compute),
        exposed,
        bottleneck_of(makespan, compute, speeds, exposed, overfull=overfull),
    )


def stages_of(module: Module) -> dict[str, tuple[int, ...]]:
    """The ranks of every stage of the pipeline, as its cascades run; empty where there is none."""
    parts = [stage.name for stage in module.stages if "part_of" in stage.attrs]
    return {
        name: tuple(sorted({rank for cascade in module.cascades if cascade.stage == name for rank in cascade.ranks}))
        for name in parts
    }


def _end(module: Module, travels: Callable[[Cascade, Cascade], float]) -> float:
    """When the last cascade ends, each begun as early as its inputs and its ranks' order allow."""
    end: dict[str, float] = {}
    free: dict[int, float] = {}
    named = {cascade.name: cascade for cascade in module.cascades}
    for cascade in global_order(module.cascades):
        there = [end[name] + travels(named[name], cascade) for name in cascade.inputs]
        begin = max([0.0, *there, *(free.get(rank, 0.0) for rank in cascade.ranks)])
        end[cascade.name] = begin + (cascade.end - cascade.start)
        free |= dict.fromkeys(cascade.ranks, end[cascade.name])
    return max(end.values(), default=0.0)


def stage_share(module: Module, stage: str, rank: int) -> float:
    """ms that one rank computes for one stage."""
    return fsum(c.end - c.start for c in module.cascades if c.stage == stage and rank in c.ranks)
