"""What is said of a clip that fits in no layout: how much it lacks, and what would make it fit.

A layout in cells of all ranks needs least on each of them: all state is dealt out, and all ranks share the clip, every
block recomputed. What a pipeline holds beside its part of the state is more.
"""

from __future__ import annotations

import math
from dataclasses import replace

from arachnec.cluster.device_kinds import Devices
from arachnec.cost.memory import Memory
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Cascade, Clip, Cluster, Module, Phase
from arachnec.ir.stage_sizes import block_count
from arachnec.planning.encoder_width import reasons_whole
from arachnec.planning.gradient_precision import with_gradient_precision
from arachnec.planning.layouts import in_cells

MOST_MACHINES = 64  # times as many


def demand_fits(module: Module) -> None:
    """Raises UserError for the longest clip, where it fits nowhere though everything is shared by all ranks."""
    assert module.cluster is not None
    longest = max(module.clips, key=lambda clip: clip.tokens, default=None)
    if longest is None or not any(stage.trained for stage in module.stages):
        return
    needed, memory = needed_gib(module, module.cluster, longest), module.cluster.memory
    if needed <= memory:
        return
    size = f"{longest.frames} x {longest.height} x {longest.width}, {longest.tokens} tokens"
    ranks = counted(module.cluster.world, "rank")
    raise user_error(
        f"clip %{longest.attrs.get('name', longest.id)} ({size}) fits in no layout: dealt out over {ranks} it needs "
        f"{needed:.3g} GiB of memory on each, their devices have {memory:.3g}",
        label="too long for this cluster",
        help=_remedy(module, longest, needed),
        span=longest.span,
    )


def may_fit(module: Module) -> bool:
    """Whether that is not so: some layout may yet fit."""
    try:
        demand_fits(module)
    except UserError:
        return False
    return True


def needed_gib(module: Module, cluster: Cluster, clip: Clip) -> float:
    """GiB on every rank of a cluster that shares one clip and all state, what stays free included."""
    stages = tuple(in_cells(stage, cluster.world) if cluster.world > 1 else stage for stage in module.stages)
    dealt = with_gradient_precision(replace(module, stages=stages, clips=(clip,), cluster=cluster))
    memory = Memory(dealt, Devices(cluster))
    cascades = (
        (stage, Cascade("0", Phase.TRAIN, stage.name, (clip.id,), 1, clip.tokens, clip.text))
        for stage in dealt.stages
        if stage.trained
    )
    most = max(memory.of(cascade, cluster.world, block_count(stage)) for stage, cascade in cascades)
    return most + memory.state


def _remedy(module: Module, clip: Clip, needed: float) -> str:
    cluster = module.cluster
    assert cluster is not None
    ways = []
    for times in range(2, MOST_MACHINES + 1):
        nodes = cluster.nodes * times
        larger = replace(cluster, attrs=cluster.attrs.updated(nodes=nodes))
        if "mixed" not in cluster.attrs and needed_gib(module, larger, clip) <= cluster.memory:
            ways.append(counted(nodes, "such machine"))
            break
    ways.append(f"devices of {math.ceil(needed)} GiB")
    low, high = 0, clip.tokens
    while high - low > 1:
        middle = (low + high) // 2
        fits = needed_gib(module, cluster, replace(clip, tokens=middle)) <= cluster.memory
        low, high = (middle, high) if fits else (low, middle)
    if low:
        ways.append(f"clips of at most {low} tokens")
    return "; ".join(["it would fit with " + ", or ".join(ways), *reasons_whole(module)])
