"""By how much a placed plan's programs exceed the memory, everything counted that `check` counts."""

from __future__ import annotations

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.cluster.topology import machines, node_of
from arachnec.ir.nodes import Module
from arachnec.lowering.programs import lower


def overflow(placed: Module) -> float:
    """GiB on the rank that exceeds its device most; below 0 where all fit.

    Beyond what cascades save and need, programs hold what was handed on and waits to be read.
    """
    assert placed.cluster is not None
    lowered, nodes = lower(placed), machines(placed.cluster)
    values = Values(lowered)
    return max(
        high_water(values, program).total - nodes[node_of(placed.cluster, program.rank)].memory
        for program in lowered.programs
    )
