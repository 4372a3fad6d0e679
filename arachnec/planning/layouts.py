"""How a model's state may lie on the ranks: the table of layouts that the default chooses from.

A layout is decided once for a run. What follows it (degrees, order, ranks) is planned for every iteration. Another
layout is another row here, and what it does to the stages a line in ``arachnec.passes.choose_layout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.ir.nodes import Cluster, Module, Stage
from arachnec.ir.parameter_cells import cell_fits
from arachnec.ir.stage_sizes import layers_of
from arachnec.ir.state_placement import place
from arachnec.ir.tables import FIGURES
from arachnec.planning.pipeline_orders import ScheduleName

REPLICATED = "replicated"
ONE_LENGTH: tuple[ScheduleName, ...] = ("1f1b", "zb-h1")
MIXED_LENGTHS: tuple[ScheduleName, ...] = ("1f1b", "planned")


@dataclass(frozen=True)
class Layout:
    """Parameters on every rank, or in cells of ``cell`` ranks, or in so many ``stages`` that run by ``schedule``, or in
    cells of the ranks of each stage.

    ``spread``: a shard's optimizer lies in parts on all ranks that hold the shard, whether it crowds the device or not.
    ``full``: a cell takes as many clips at once as fit with every block recomputed, and so gathers less often.
    """

    name: str = REPLICATED
    cell: int = 1
    spread: bool = False
    full: bool = False
    stages: int = 1
    schedule: ScheduleName | None = None


def layouts(module: Module) -> Iterator[Layout]:
    """Every layout of a traced module on its cluster, the plainest first."""
    yield Layout()
    if module.cluster is None:
        return
    for size in cell_sizes(module.cluster):
        for spread in (False, True) if size < module.cluster.world else (False,):
            name = f"cells-{size}{'-spread' if spread else ''}"
            yield Layout(name, cell=size, spread=spread)
            yield Layout(f"{name}-full", cell=size, spread=spread, full=True)
    schedules = ONE_LENGTH if len({(clip.tokens, clip.text) for clip in module.clips}) < 2 else MIXED_LENGTHS
    for count in stage_counts(module, module.cluster):
        for schedule in schedules:
            yield Layout(f"stages-{count}-{schedule}", stages=count, schedule=schedule)
            if (size := largest_cell(module.cluster, module.cluster.world // count)) > 1:
                yield Layout(f"stages-{count}-cells-{size}-{schedule}", cell=size, stages=count, schedule=schedule)


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


def largest_cell(cluster: Cluster, ranks: int) -> int:
    """The largest cell of a stage's ranks inside a machine: stages are there so that no gather leaves one."""
    fitting = (size for size in range(1, min(ranks, cluster.gpus) + 1) if ranks % size == 0)
    return max(size for size in fitting if cell_fits(size, cluster.nodes, cluster.gpus))


def stage_counts(module: Module, cluster: Cluster) -> Iterator[int]:
    """Numbers of stages that divide the ranks, at most one for each block; none where the model cannot be cut."""
    trained = [stage for stage in module.stages if stage.trained]
    if len(trained) != 1 or any(name not in trained[0].attrs for name in FIGURES):
        return
    for count in range(2, min(cluster.world, len(layers_of(trained[0]))) + 1):
        if cluster.world % count == 0:
            yield count


def in_cells(stage: Stage, cell: int) -> Stage:
    """A trained stage with its state dealt out over cells of so many ranks; any other as it is."""
    if not stage.trained or "cell" in stage.attrs or "sharded" in stage.attrs:
        return stage
    return place(stage, cell=cell)
