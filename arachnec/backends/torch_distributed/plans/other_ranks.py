"""A pipeline of passes on other ranks than it was written for. In: passes with numbers of stages and of ranks, and the
cluster that runs. Out: the same passes, with as many as there is room for.

A host that is lost leaves a job with fewer ranks, and it goes on there. What says how many ranks hold a stage or a cell
is given up where it does not fit, and planned; orders that a file says are given up always.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from arachnec.ir.nodes import Cluster
from arachnec.ir.parameter_cells import cell_fits
from arachnec.passes.infra.base import Pass
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.schedule_pipeline import SchedulePipeline
from arachnec.passes.schedule_same_bucket import ScheduleSameBucket
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.shard_parameters import ShardParameters
from arachnec.passes.stages import Stages


def on_other_ranks(pipeline: Pipeline, cluster: Cluster) -> Pipeline:
    """The passes for a cluster of other size than the one that they were written for.

    ``stages`` keeps its ``p`` or ``cuts`` where the ranks of one pipeline divide all ranks. Else there is one pipeline
    of the most ranks, no more than before, that do. A ``degree`` stays where it divides the ranks of a stage, a
    ``cell`` too, else it is the largest that does; ``replicas`` and ``degrees`` are planned anew, and ``orders`` of a
    file give way to the schedule: they are for as many micro-batches as each pipeline had. The one ``degree`` of a
    fixed layout is at most all ranks.
    """
    schedule = next((step for step in pipeline.passes if isinstance(step, SchedulePipeline)), SchedulePipeline())
    per_rank = schedule.stages_each
    count = next((_count(step) for step in pipeline.passes if isinstance(step, Stages)), None)
    ranks = None if count is None else count // per_rank  # of one pipeline
    fitting = 1 if ranks is None else _most(ranks, cluster.world)
    replicas = cluster.world // fitting
    degree = schedule.degree if replicas % (schedule.degree or 1) == 0 else None

    def fitted(step: Pass) -> Pass:
        if isinstance(step, ShardParameters) and step.cell.isdecimal():
            cells = [size for size in range(1, int(step.cell) + 1) if replicas % size == 0]
            return replace(step, cell=str(max(size for size in cells if cell_fits(size, cluster.nodes, cluster.gpus))))
        if isinstance(step, Stages) and ranks is not None:
            fewer: dict[str, Any] = {} if fitting == ranks else {"p": fitting * per_rank, "cuts": None}
            return replace(step, replicas=None, **fewer)
        if isinstance(step, SchedulePipeline):
            return replace(step, degree=degree, degrees=None, orders=None)
        if isinstance(step, ScheduleStatic | ScheduleSameBucket) and step.degree is not None:
            return replace(step, degree=min(step.degree, cluster.world))
        return step

    return Pipeline(tuple(map(fitted, pipeline.passes)))


def _count(stages: Stages) -> int | None:
    return stages.p if stages.cuts is None else len(stages.cuts) + 1


def _most(ranks: int, world: int) -> int:
    return max(number for number in range(1, max(1, ranks) + 1) if world % number == 0)
