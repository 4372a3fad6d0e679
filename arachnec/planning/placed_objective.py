"""How long an iteration of a placed plan takes: shared links, exposed synchronisation, and what later passes do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arachnec.analysis.uses import READS_GRADIENTS, Values
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Reduce, Stage, Step
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.stage_sizes import gradient_bytes, gradient_element_bytes, layers_of
from arachnec.ir.values import Attributes
from arachnec.lowering.buckets import Ends, can_reverse, last_backwards, time_reversed, with_buckets
from arachnec.lowering.programs import lower
from arachnec.planning.formulate import has_gradient
from arachnec.simulation.events import Engine


@dataclass(frozen=True)
class Following:
    """By default what ``place,bucket`` without options do.

    ``topology`` is that of ``place``; ``mib`` that of ``bucket``. ``buckets`` says whether there is a ``bucket``,
    ``reversible`` whether it may run the plan from its end to its beginning.
    """

    topology: bool = True
    buckets: bool = True
    mib: int | None = None
    reversible: bool = True


def simulated_ms(
    module: Module,
    cluster: Cluster,
    cascades: Sequence[Cascade],
    following: Following = Following(),
) -> float:
    """ms of a costed module's iteration, its cascades placed like this, until its optimizer steps.

    The costs of a plan are those of a cascade that has its links to itself. Groups on one NIC, one uplink or one host's
    PCIe slow each other down, and so do all-reduces and the backwards that hide them. The discrete events
    (``arachnec.simulation``) know that; they take 17 ms of processor time for 16 cascades on 16 GPUs and 0.1 s for 105
    on 256, three to eight times what placing them takes.
    """
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


@dataclass(frozen=True)
class StageSync:
    """Of one stage: what its all-reduces take.

    ``behind[n]`` are the ms of all but the last n layers, what lies in no layer included: what cannot begin before the
    backward has passed one layer more.
    """

    stage: Stage
    latency: float  # ms
    behind: tuple[float, ...]


class ExposedSync:
    """Of placed plans of one module: ms until the last all-reduce is through, time-reversed where that is shorter.

    The makespan where no stage names its layers or one rank is alone: a plan changes nothing then. ``following`` says
    whether there are buckets, and whether a plan may be reversed.

    ``bucket`` hides all-reduces behind the last backward of every rank, so that of two plans of equal makespan the one
    that ends with long cascades on all ranks is through first; with short cascades and slow links that is worth more
    than a percent of makespan. Counted here is what ever smaller buckets come to, each reduced once its gradients are
    complete on every rank and the buckets before it are through; ``bucket`` finds the real ones.
    """

    def __init__(self, module: Module, cost: CostModel, following: Following = Following()) -> None:
        self.module = module
        self.ranks = tuple(range(cost.cluster.world))
        trained = [s for s in module.stages if gradient_bytes(s) and layers_of(s) and not cell_of(s)]
        syncs = tuple(sync_of(stage, self.ranks, cost) for stage in trained) if len(self.ranks) > 1 else ()
        whole = tuple(replace(sync, behind=sync.behind[:1]) for sync in syncs)
        self.syncs = syncs if following.buckets else whole
        self.reversible = following.reversible and can_reverse(module)

    @property
    def least(self) -> float:
        """ms from the makespan on that are left at least: the all-reduce of what no backward can hide."""
        return max((sync.latency + sync.behind[-1] for sync in self.syncs), default=0.0)

    def of(self, cascades: Sequence[Cascade]) -> float:
        makespan = max((cascade.end for cascade in cascades), default=0.0)
        if not self.syncs:
            return makespan
        plan = replace(self.module, cascades=tuple(cascades))
        return max(makespan, min(map(self._through, [plan, *([time_reversed(plan)] if self.reversible else [])])))

    def _through(self, plan: Module) -> float:
        return max(through(sync, last_backwards(plan, sync.stage, self.ranks)) for sync in self.syncs)


def sync_of(stage: Stage, ranks: tuple[int, ...], cost: CostModel) -> StageSync:
    total = gradient_bytes(stage)
    rate = (cost.reduce_time(stage, ranks, total) - cost.reduce_time(stage, ranks, total / 2)) / (total / 2)
    latency = max(0.0, cost.reduce_time(stage, ranks, total) - rate * total)
    left, behind = total, []
    for _, parameters in reversed(layers_of(stage)):
        behind.append(rate * left)
        left -= parameters * gradient_element_bytes(stage)
    return StageSync(stage, latency, tuple(behind))


def through(sync: StageSync, ends: Ends) -> float:
    """When the last all-reduce of a stage is through, given when last backwards end and how long they take, in ms."""
    layers = len(sync.behind)
    return sync.latency + max(
        max(end - span * (layers - passed) / layers for end, span in ends) + behind
        for passed, behind in enumerate(sync.behind, 1)
    )
