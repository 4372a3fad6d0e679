"""What of a plan lies in host memory, in sentences: how much, what crosses, and what of it shows."""

from __future__ import annotations

import math

from arachnec.cluster.device_specs import copy_speed, device_copy_speed, usable_host_memory
from arachnec.cluster.topology import node_of
from arachnec.cost.model import CostModel
from arachnec.ir.host_placement import in_host, optimizer_in_host
from arachnec.ir.nodes import Cascade, Module, integer
from arachnec.verification.host_memory import host_peak
from arachnec.views.format import ms

GIB = 2**30


def host_sentences(module: Module, cost: CostModel) -> list[str]:
    """Nothing where nothing lies there."""
    stages = [stage for stage in module.stages if in_host(stage)]
    if not stages or module.cluster is None:
        return []
    cluster = module.cluster
    parts = ", ".join(f"{' and '.join(in_host(stage))} of @{stage.name}" for stage in stages)
    named = {cascade.name: cascade for cascade in module.cascades}
    peaks = [(node_of(cluster, program.rank), *host_peak(program, named)) for program in module.programs]
    fullest = max({node for node, _, _ in peaks}, key=lambda node: sum(s + i for n, s, i in peaks if n == node))
    state, inputs = (math.fsum(peak[at] for peak in peaks if peak[0] == fullest) for at in (1, 2))
    sentences = [
        f"In host memory lie {parts}: {state + inputs:.1f} GiB of {usable_host_memory(cluster):.1f} on a node"
        + (f", {inputs:.1f} of them inputs of blocks." if inputs else ".")
    ]
    busiest = max(module.cascades, key=lambda c: cost.shown_copies(c, c.ranks), default=None)
    if busiest is not None:
        sentences += _crossing(module, busiest, cost)
    for stage in stages:
        if optimizer_in_host(stage):
            sentences.append(
                f"The optimizer of @{stage.name} runs on the hosts' processors: {ms(cost.step_time(stage))}."
            )
    return sentences


def _crossing(module: Module, cascade: Cascade, cost: CostModel) -> list[str]:
    """Of the cascade that waits for its hosts longest."""
    assert module.cluster is not None
    program = next(program for program in module.programs if program.rank == cascade.ranks[0])
    steps = [step.attrs for step in program.instructions if step.target == cascade.name]
    brought, taken = (sum(integer(own.get(name, 0)) for own in steps) for name in ("from_host", "to_host"))
    if not brought and not taken:
        return []
    speed, own = copy_speed(module.cluster), device_copy_speed(module.cluster)
    shared = "" if speed == own else f", {own:.0f} alone"
    copies = max(brought, taken) / (speed * 1e6)
    shown = cost.shown_copies(cascade, cascade.ranks)
    return [
        f"%{cascade.name} brings {brought / GIB:.1f} GiB from there to each rank and takes {taken / GIB:.1f} back, at "
        f"{speed:.0f} GB/s each way{shared}: {ms(copies)} of copies, of which {ms(shown)} show."
    ]
