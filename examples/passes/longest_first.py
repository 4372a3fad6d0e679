"""A scheduling policy of one's own: the longest cascade first, at the degree with the least work that keeps up.

    arachnec compare model.py --data clips.jsonl --cluster 2x8:h100-80g --load examples/passes/longest_first.py \
        --pipelines "default;data-parallel;partition,annotate,longest-first,place,lower,check"
"""

from dataclasses import dataclass
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.planning.formulate import with_times


@dataclass(frozen=True)
class LongestFirst(Pass):
    """``slack``: how much longer than an even share of all work a cascade may take."""

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED
    slack: float = 1.0

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        options = {c.name: cost.options(c) for c in module.cascades}  # degree to ms, where the memory allows it
        least = {name: min(d * ms for d, ms in of.items()) for name, of in options.items()}  # GPU ms
        share = self.slack * sum(least.values()) / cost.cluster.world
        free = [0.0] * cost.cluster.world  # when each GPU is free, ms
        depth, degrees, times = {}, {}, {}
        for c in module.cascades:
            depth[c.name] = 1 + max((depth[name] for name in c.inputs), default=0)
        for c in sorted(module.cascades, key=lambda c: (depth[c.name], -least[c.name])):
            of = options[c.name]
            degree = min(of, key=lambda d: (max(of[d], share), d * of[d]))
            free.sort()
            start = max(free[degree - 1], max((times[name][1] for name in c.inputs), default=0.0))
            degrees[c.name], times[c.name] = degree, (start, start + of[degree])
            free[:degree] = [start + of[degree]] * degree
        return with_times(module, degrees, times)
