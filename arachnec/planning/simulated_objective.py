"""How long an iteration of a placed plan takes when what its cascades share is counted.

The costs of a plan are those of a cascade that has its links to itself. Groups on one NIC, one uplink or one host's
PCIe slow each other down, and so do all-reduces and the backwards that hide them. The discrete events that
``arachnec compare`` reports (``arachnec.simulation``) know that; they take 17 ms of processor time for 16 cascades on
16 GPUs and 0.1 s for 105 on 256, three to eight times what placing them takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arachnec.analysis.uses import READS_GRADIENTS, Values
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Reduce, Step
from arachnec.ir.values import Attributes
from arachnec.lowering.buckets import with_buckets
from arachnec.lowering.programs import lower
from arachnec.planning.following import Following
from arachnec.planning.formulate import has_gradient
from arachnec.simulation.events import Engine


def simulated_ms(
    module: Module,
    cluster: Cluster,
    cascades: Sequence[Cascade],
    following: Following = Following(),  # noqa: B008
) -> float:
    """ms of a costed module's iteration, its cascades placed like this, until its optimizer steps."""
    trained = [stage.name for stage in module.stages if stage.trained]
    everyone = Attributes.of(ranks=tuple(range(cluster.world)))
    placed = replace(
        module,
        level=Level.PLACED,
        cascades=tuple(cascades),
        reductions=tuple(
            Reduce(name, tuple(c.name for c in cascades if c.stage == name and has_gradient(c)), everyone)
            for name in trained
        ),
        steps=tuple(Step(name) for name in trained),
    )
    lowered = lower(with_buckets(placed, following.mib, following.reversible) if following.buckets else placed)
    engine = Engine(Values(lowered), cluster)
    engine.run()
    return max((interval.end for interval in engine.intervals if interval.op not in READS_GRADIENTS), default=0.0)
