"""``rounds``: where the rest of the requests may be planned again (``planning.sampling.rounds``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, quantity
from arachnec.ir.sampling import outcomes_of
from arachnec.ir.values import Quantity
from arachnec.passes.infra.base import Count, Duration, Pass
from arachnec.planning.placement import end_of
from arachnec.planning.sampling.chains import Rates, request_chains
from arachnec.planning.sampling.replan import rounds_until
from arachnec.planning.sampling.rounds import in_rounds, placed_round_by_round, with_memory

PLANNING = 30.0  # ms of a round for each step that a switch may end: two to four times what planning again takes
LEAST = 4000.0  # ms of any round


@dataclass(frozen=True)
class Rounds(Pass):
    """A plan of requests whose switches come when they come, in rounds: at the end of each the rest is planned again.

    The makespan has at most ``most`` of them, each of ``least`` or more; by default each is long enough for ranks not
    to wait for the next. Without uncertain switches, on one rank, where a rank does not hold all stages, and where a
    latency counts and not the makespan, the plan stays as it is.
    """

    needs: ClassVar[Level] = Level.PLACED
    gives: ClassVar[Level] = Level.PLACED

    most: Count = 12
    least: Duration | None = None

    def run(self, module: Module) -> Module:
        makespan = quantity(module.attrs["makespan"])
        open_steps = sum(len(outcomes_of(clip)) - 1 for clip in module.clips if "steps" in clip.attrs)
        least = max(LEAST, PLANNING * open_steps) if self.least is None else self.least
        length = max(least, makespan / self.most)
        moment = rounds_until(0.0, length, makespan)
        if open_steps == 0 or "objective" in module.attrs or moment > makespan or not self._fits_everywhere(module):
            return module
        cut = in_rounds(module, sorted(module.cascades, key=lambda cascade: cascade.start), moment, 0)
        cascades = placed_round_by_round(module, (), cut)
        attrs = module.attrs.updated(
            round=Quantity(length, "ms"), rounds=self.most, makespan=Quantity(max(makespan, end_of(cascades)), "ms")
        )
        whole = replace(module, cascades=tuple(cascades), attrs=attrs)
        return replace(whole, cascades=tuple(with_memory(whole, cascades)))

    def _fits_everywhere(self, module: Module) -> bool:
        if module.cluster is None or module.cluster.world == 1:
            return False
        cost = CostModel(module)
        return not isinstance(
            request_chains(module, Rates(cost, {cascade.stage for cascade in module.cascades})), Cascade
        )
