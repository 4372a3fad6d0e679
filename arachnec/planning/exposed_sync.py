"""When the gradients of a placed plan would be summed: what an iteration lasts but for the optimizer's step.

``bucket`` hides sums behind the last backward of every rank, so that of two plans of equal makespan the one that ends
with long cascades on all ranks is through first; with short cascades and slow links that is worth more than a percent
of makespan. Counted here is what ever smaller buckets come to, each summed once its gradients are whole on every rank
and the buckets before it are through; ``bucket`` finds the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from arachnec.cost.model import CostModel
from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Cascade, Module, Stage
from arachnec.ir.stage_sizes import gradient_bytes, gradient_element_bytes
from arachnec.lowering.buckets import Ends, can_reverse, last_backwards, time_reversed


@dataclass(frozen=True)
class Sums:
    """Of one stage: what its sums take.

    ``behind[n]`` are the ms of all but the last n layers, what lies in no layer included: what cannot begin before the
    backward has passed one layer more.
    """

    stage: Stage
    latency: float  # ms
    behind: tuple[float, ...]


class Ending:
    """Of placed plans of one module: ms until the last sum is through, turned round where that is shorter.

    The makespan where no stage names its layers or one rank is alone: a plan changes nothing then.
    """

    def __init__(self, module: Module, cost: CostModel) -> None:
        self.module = module
        self.ranks = tuple(range(cost.cluster.world))
        trained = [stage for stage in module.stages if stage.trained and layers_of(stage)]
        self.sums = tuple(sums_of(stage, self.ranks, cost) for stage in trained) if len(self.ranks) > 1 else ()
        self.turning = can_reverse(module)

    @property
    def least(self) -> float:
        """ms from the makespan on that are left at least: the sum of what no backward can hide."""
        return max((each.latency + each.behind[-1] for each in self.sums), default=0.0)

    def of(self, cascades: Sequence[Cascade]) -> float:
        makespan = max((cascade.end for cascade in cascades), default=0.0)
        if not self.sums:
            return makespan
        plan = replace(self.module, cascades=tuple(cascades))
        return max(makespan, min(map(self._through, [plan, *([time_reversed(plan)] if self.turning else [])])))

    def _through(self, plan: Module) -> float:
        return max(through(each, last_backwards(plan, each.stage, self.ranks)) for each in self.sums)


def sums_of(stage: Stage, ranks: tuple[int, ...], cost: CostModel) -> Sums:
    total = gradient_bytes(stage)
    rate = (cost.reduce_time(stage, ranks, total) - cost.reduce_time(stage, ranks, total / 2)) / (total / 2)
    latency = max(0.0, cost.reduce_time(stage, ranks, total) - rate * total)
    left, behind = total, []
    for _, parameters in reversed(layers_of(stage)):
        behind.append(rate * left)
        left -= parameters * gradient_element_bytes(stage)
    return Sums(stage, latency, tuple(behind))


def through(sums: Sums, ends: Ends) -> float:
    """When the last sum of a stage is through, given when the last backwards end and how long they take, all in ms."""
    layers = len(sums.behind)
    return sums.latency + max(
        max(end - span * (layers - passed) / layers for end, span in ends) + behind
        for passed, behind in enumerate(sums.behind, 1)
    )
