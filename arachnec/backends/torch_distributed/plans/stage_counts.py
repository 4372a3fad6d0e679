"""Whether a model runs in as many stages as it was compiled with. In: both programs. Out: a note, or none."""

from __future__ import annotations

from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module


def says_other_stages(compiled: Module, planned: Module) -> str | None:
    """What a person should know where ``planned`` for this run's ranks has another number of trained stages."""
    before, now = (sum(stage.trained for stage in module.stages) for module in (compiled, planned))
    if before == now or compiled.cluster is None or planned.cluster is None:
        return None
    ranks = counted(compiled.cluster.world, "rank"), counted(planned.cluster.world, "rank")
    return f"compiled as {counted(before, 'stage')} for {ranks[0]}, run as {counted(now, 'stage')} on {ranks[1]}"
