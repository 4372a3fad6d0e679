"""Which ranks hold a stage's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from arachnec.ir.head_density import sparse_stages
from arachnec.ir.nodes import Cluster, Module, Phase, Stage, integers
from arachnec.ir.sampling import is_sampling
from arachnec.ir.stage_sizes import gib
from arachnec.ir.state_placement import GIB, held_twice


def resident_ranks(module: Module, cluster: Cluster, stage: Stage) -> frozenset[int]:
    """The ranks that hold a stage's parameters.

    Encoders and stages of ``train`` cascades are on every rank, so that the next iteration may place its cascades
    anywhere. Stages of a pipeline, and all that sample, are where their cascades run. ``ranks`` on the stage's reduce
    overrides both.
    """
    for reduce in module.reductions:
        if reduce.stage == stage.name and "ranks" in reduce.attrs:
            return frozenset(integers(reduce.attrs["ranks"]))
    own = [cascade for cascade in module.cascades if cascade.stage == stage.name]
    if any(cascade.phase in (Phase.TRAIN, Phase.ENCODE) for cascade in own) and not is_sampling(module):
        return frozenset(range(cluster.world))
    return frozenset(rank for cascade in own for rank in cascade.ranks)


def resident_gib(stages: Sequence[Stage], name: str) -> float:
    """GiB of ``state`` or ``host_state`` of these stages on one rank, what several of them hold counted once."""
    twice = held_twice(stages)
    both = twice.device if name == "state" else twice.host
    return math.fsum(gib(stage.attrs.get(name)) for stage in stages) - both / GIB


def learning_ranks(module: Module, cluster: Cluster) -> list[tuple[int, ...]]:
    """The groups of the all-reduces of ``learn``: of every stage with predictors the ranks that hold it, then all."""
    stages = sparse_stages(module).values()
    everyone = [tuple(range(cluster.world))] if stages else []
    return list(dict.fromkeys([*(tuple(sorted(resident_ranks(module, cluster, s))) for s in stages), *everyone]))
