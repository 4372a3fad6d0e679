"""What every stage of a pipeline computes, holds, sends and waits, in sentences; and what costs most."""

from __future__ import annotations

from collections.abc import Callable
from math import fsum

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Cascade, Module
from arachnec.ir.stage_sizes import layers_of
from arachnec.lowering.order import global_order
from arachnec.pipelining.pipeline_model import Bottleneck, Performance, bottleneck_of
from arachnec.planning.cascade_ranks import arrival
from arachnec.views.format import ms, ranges


def module_performance(module: Module, cost: CostModel) -> Performance:
    """Of every rank of the cluster, in ms and GiB.

    Compute is what its cascades take; messages are those that it sends. Exposed is how much earlier the last cascade
    would end if they were free, every rank's order kept.

    AdaPtis' performance model of a module (2509.23722, section 4).
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


REMEDIES: dict[Bottleneck, str] = {
    "memory": "some rank is over its memory; more stages, or more blocks recomputed, lower that",
    "compute": "one rank has more to compute than its share; other cuts or several stages a rank even that out",
    "communication": "transfers that nothing hides; a larger k of `kfkb`, or warm-up policy B of `dapple`, hides more",
    "bubble": "ranks that wait for the pipeline to fill and drain; more micro-batches or more stages a rank lower that",
}


def pipeline_sentences(module: Module, cost: CostModel) -> list[str]:
    """Nothing for a module without stages."""
    places = stages_of(module)
    if not places:
        return []
    costs = module_performance(module, cost)
    sentences = [_stage(module, cost, costs, name, ranks) for name, ranks in places.items()]
    return [*sentences, _transfers(costs), f"What costs most is {costs.bottleneck}: {REMEDIES[costs.bottleneck]}."]


def _stage(module: Module, cost: CostModel, costs: Performance, name: str, ranks: tuple[int, ...]) -> str:
    """Of the rank that computes longest for it."""
    blocks = counted(len(layers_of(cost.stages[name])), "block")
    rank = max(ranks, key=lambda rank: stage_share(module, name, rank))
    own = stage_share(module, name, rank)
    others = [other for other, held in stages_of(module).items() if other != name and rank in held]
    together = f", beside {' and '.join(f'@{other}' for other in others)}" if others else ""
    memory = machines(cost.cluster)[node_of(cost.cluster, rank)].memory
    who = "rank" if len(ranks) == 1 else "ranks"
    return (
        f"@{name}, {blocks} on {who} {ranges(ranks)}{together}: computes {ms(own)}; rank {rank} holds up to "
        f"{costs.memory[rank]:.3g} of {memory:.3g} GiB, sends for {ms(costs.communication[rank])} and waits "
        f"{ms(costs.bubble[rank])}, {100 * costs.bubble[rank] / costs.makespan:.1f} % of the time."
    )


def _transfers(costs: Performance) -> str:
    most = max(costs.communication)
    if most <= 0:
        return "No stage hands anything to another rank."
    hidden = max(0.0, most - costs.exposed)
    return (
        f"The rank that sends most does so for {ms(most)}; without transfers the last cascade would end "
        f"{ms(costs.exposed)} earlier, so at least {ms(hidden)} are overlapped with compute."
    )
