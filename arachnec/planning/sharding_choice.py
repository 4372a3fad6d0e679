"""Whether a model's parameters are dealt out over cells, and over how large ones. In: a costed module. Out: ms.

What tells them apart is known before anything is scheduled. Replicated, cascades may take any ranks, nothing is
gathered, and the state leaves less room, so that more is recomputed and short clips are cut up. In cells it is the
other way round. The bound on the makespan holds all of it: it knows which degrees fit, and what recomputing and
gathering cost. With the end of the iteration beside it, alternatives are compared by a sum that takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cluster, Module
from arachnec.ir.parameter_cells import cell_fits, cell_of, replicas
from arachnec.planning.formulate import problem_of
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import TICKS

WORTH = 0.03  # of the iteration, that cells must save where the model fits without


def estimated_ms(module: Module) -> float:
    """ms of an iteration of a costed module, at least: its cascades, and what follows them.

    Raises UserError where a clip fits nowhere.
    """
    cost = CostModel(module)
    makespan = lower_bound(problem_of(module, cost)) / TICKS
    return makespan + sum(_end(module, cost, name) for name in (s.name for s in module.stages if s.trained))


def _end(module: Module, cost: CostModel, name: str) -> float:
    """Shards are summed between cells when all backwards have ended; whole gradients beside them, in buckets."""
    stage, world = cost.stages[name], cost.cluster.world
    cell = cell_of(stage) or 1
    summed = cost.reduce_time(stage, replicas(0, cell, tuple(range(world)))) if cell > 1 else 0.0
    return summed + cost.step_time(stage)


def cell_sizes(cluster: Cluster) -> Iterator[int]:
    """The sizes of cells that are worth a comparison: parts of a machine, machines by doubling, and all ranks."""
    doubled = cluster.gpus
    for size in range(2, cluster.world + 1):
        if not cell_fits(size, cluster.nodes, cluster.gpus):
            continue
        while doubled < size:
            doubled *= 2
        if size <= cluster.gpus or size in (doubled, cluster.world):
            yield size
