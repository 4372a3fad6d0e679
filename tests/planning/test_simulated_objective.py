"""The scheduler's last word is the simulated iteration: what it says, and that no layout it has judged is shorter."""

from __future__ import annotations

import pytest

from arachnec.backends.simulator import simulate
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.passes.bucket import Bucket
from arachnec.passes.infra.base import Pass
from arachnec.passes.lower import Lower
from arachnec.passes.place import Place
from arachnec.passes.schedule_dynamic_cp import ScheduleDynamicCp
from arachnec.passes.schedule_knapformer import ScheduleKnapformer
from arachnec.passes.schedule_same_bucket import ScheduleSameBucket
from arachnec.passes.schedule_static import ScheduleStatic
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.planning.placed_objective import simulated_ms
from tests.planning.test_baselines import module

LENGTHS = [3000, 500, 400, 2500, 900, 60, 60, 1200]
CLUSTERS = ("2x4:h100-80g", "2x4:l20", "2x2:h100-80g+2x2:a100-80g")


def iteration(plan: Module) -> float:
    """ms until the optimizer steps."""
    intervals = simulate(Lower().run(Bucket().run(plan))).timeline.intervals
    return max(interval.end for interval in intervals if interval.op != "step")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_scheduler_counts_what_the_simulator_reports(cluster: str) -> None:
    costed = module(cluster, LENGTHS, encoders=1)
    plan = Place().run(ScheduleKnapformer().run(costed))
    assert simulated_ms(costed, CostModel(costed).cluster, plan.cascades) == pytest.approx(iteration(plan))


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(
    "baseline",
    [
        ScheduleStatic(),
        ScheduleStatic(policy="data-parallel"),
        ScheduleDynamicCp(),
        ScheduleSameBucket(),
        ScheduleKnapformer(),
    ],
    ids=repr,
)
def test_no_layout_of_the_same_micro_batches_is_shorter_than_the_default(cluster: str, baseline: Pass) -> None:
    costed = module(cluster, LENGTHS)
    ours, theirs = (iteration(Place().run(policy.run(costed))) for policy in (ScheduleZ3(steps=300), baseline))
    assert ours <= theirs * (1 + 1e-6)
