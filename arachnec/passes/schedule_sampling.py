"""``schedule-sampling``: degrees, borders, order and ranks of requests' segments (``planning.sampling.plan``)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar, Literal

from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Count, CountFromZero, Duration, Pass
from arachnec.planning.sampling.plan import planned
from arachnec.solver.budget import Clock


@dataclass(frozen=True)
class ScheduleSampling(Pass):
    """Plans requests. ``budget`` limits the wall time of the search, ``steps`` a count of its work instead.

    ``policy`` is the search, or what another does: ``replica`` (each rank a request), ``one-degree`` (all ranks one
    request after another) or ``two-pools`` (a fixed share of ranks for each model, the best by enumeration).
    At most ``batch`` equal requests take their steps together, where the search finds that to save work.
    ``objective`` is the makespan, or the mean or 95th percentile of latency from each request's arrival.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    policy: Literal["search", "replica", "one-degree", "two-pools"] = "search"
    objective: Literal["makespan", "mean-latency", "p95-latency"] = "makespan"
    budget: Duration = Duration(1000.0)
    batch: Count = 4
    seed: int = 0
    steps: CountFromZero | None = None

    def run(self, module: Module) -> Module:
        clock = Clock(time.perf_counter(), self.budget, self.steps)
        return planned(module, clock, policy=self.policy, objective=self.objective, batch=self.batch, seed=self.seed)
