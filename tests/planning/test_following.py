"""A scheduler plans for the passes that follow it in its own pipeline."""

from __future__ import annotations

import pytest

from arachnec.cost.model import CostModel
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.planning.formulate import problem_of
from arachnec.planning.placed_objective import Following
from arachnec.planning.placed_search import Measure, solve_placed
from arachnec.solver.budget import Clock
from tests.planning.test_placement import module


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("schedule-z3", Following()),
        ("schedule-z3,place,bucket,lower,check", Following()),
        ("schedule-z3,place{topology=false},bucket,lower", Following(topology=False)),
        ("schedule-z3,place,bucket{mib=25,reverse=false},lower", Following(mib=25, reversible=False)),
        ("schedule-z3,place,lower", Following(buckets=False, reversible=False)),
    ],
)
def test_the_settings_of_what_follows_are_known_and_print_nowhere(text: str, expected: Following) -> None:
    pipeline = Pipeline.parse(text)
    informed = pipeline.passes[0].informed(pipeline.passes[1:])
    assert isinstance(informed, ScheduleZ3)
    assert informed.following_settings == expected
    assert str(Pipeline((informed, *pipeline.passes[1:]))) == text
    assert informed == pipeline.passes[0]


def test_a_schedule_is_judged_by_the_placement_that_follows() -> None:
    costed = module("2x4:h100-80g", [3000, 500, 400, 2500, 900, 60, 60, 1200], encoders=0)
    cost = CostModel(costed)
    problem = problem_of(costed, cost)
    spread = Following(topology=False)
    plans = [
        solve_placed(
            costed, cost, problem, Clock(0.0, 0.0, steps=300), seed=0, following=known, baselines=True
        ).schedule
        for known in (spread, Following())
    ]
    measure = Measure(costed, cost, problem, spread)
    assert measure.simulated(plans[0]) <= measure.simulated(plans[1])
