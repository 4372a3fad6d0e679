"""Whether a model's parameters are dealt out over cells, and over how large ones. In: a traced module. Out: the size.

Replicated, cascades may take any ranks, and nothing is gathered. So cells are the answer where that does not fit: for
some clip there is no room beside the state, however many ranks share it. Then the smallest cells are taken with which
every clip fits, those within a machine first: the smaller a cell, the fewer ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arachnec.ir.nodes import Module, Stage, quantity
from arachnec.ir.parameter_cells import cell_fits, gathered_gib
from arachnec.ir.values import Quantity
from arachnec.planning.gradient_precision import least_degrees, with_gradient_precision


def least_cell(module: Module, in_cells: Callable[[Stage, int], Stage]) -> int:
    """1 where every clip fits with the optimizer alone dealt out, else the smallest cell with which every clip fits.

    Where none is large enough, that of all ranks.
    """
    cluster = module.cluster
    assert cluster is not None
    if None not in least_degrees(with_gradient_precision(_optimizer_dealt_out(module))):
        return 1
    sizes = [size for size in range(2, cluster.world + 1) if cell_fits(size, cluster.nodes, cluster.gpus)]
    for size in sizes:
        stages = tuple(_with_gathered(in_cells(stage, size)) for stage in module.stages)
        dealt_out = with_gradient_precision(replace(module, stages=stages))
        if None not in least_degrees(dealt_out):
            return size
    return cluster.world


def _optimizer_dealt_out(module: Module) -> Module:
    """The least state that a replicated model has on every rank."""
    assert module.cluster is not None
    ranks = module.cluster.world
    return replace(module, stages=tuple(_least_state(stage, ranks) for stage in module.stages))


def _least_state(stage: Stage, ranks: int) -> Stage:
    if not stage.trained or not {"state", "optimizer"} <= set(stage.attrs) or "sharded" in stage.attrs:
        return stage
    spared = quantity(stage.attrs["optimizer"]) * (1 - 1 / ranks)
    state = Quantity(quantity(stage.attrs["state"]) - spared, "GiB")
    return replace(stage, attrs=stage.attrs.updated(state=state, sharded=ranks))


def _with_gathered(stage: Stage) -> Stage:
    """A stage whose state counts what is gathered at once, too."""
    if "state" not in stage.attrs:
        return stage
    state = quantity(stage.attrs["state"]) + gathered_gib(stage)
    return replace(stage, attrs=stage.attrs.updated(state=Quantity(state, "GiB")))
