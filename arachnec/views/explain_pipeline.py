"""What every stage of a pipeline computes, holds, sends and waits, in sentences; and what costs most."""

from __future__ import annotations

from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module
from arachnec.ir.stage_sizes import layers_of
from arachnec.pipelining.pipeline_model import Bottleneck, Performance
from arachnec.planning.pipeline_performance import module_performance, stage_share, stages_of
from arachnec.views.format import ms, ranges

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
