"""The figures of a report agree with what the page, ``explain`` and the simulator say of the same program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.simulator import simulate
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level
from arachnec.ir.parser import parse_file
from arachnec.report import plan_report, synchronisation_ms
from arachnec.views.timeline import planned

GOLDEN = Path(__file__).parents[1] / "golden" / "check"
BUCKETS = GOLDEN / "buckets_valid.cascade"


def test_sums_that_hide_behind_backwards_do_not_count_in_the_iteration() -> None:
    program = parse_file(BUCKETS)
    report = plan_report(program, 0.0)
    assert program.level is Level.LOWERED
    assert report["iteration_ms"] == pytest.approx(planned(program).end)
    assert report["iteration_ms"] == pytest.approx(simulate(program).iteration_ms, rel=0.05)
    assert report["iteration_ms"] < report["makespan_ms"] + 0.9 * synchronisation_ms(program, CostModel(program))


@pytest.mark.parametrize("planned_exactly", ["encoder_on_its_cell", "sampling_adaptive"])
def test_a_cascade_that_says_no_memory_counts_as_its_stage_says(planned_exactly: str) -> None:
    program = parse_file(GOLDEN / f"{planned_exactly}.cascade")
    unsaid = tuple(replace(c, attrs=c.attrs.updated(memory=None)) for c in program.cascades)
    assert all("memory" in cascade.attrs for cascade in program.cascades)
    left_out = plan_report(replace(program, cascades=unsaid), 0.0)
    assert left_out["peak_memory_gib"] == pytest.approx(plan_report(program, 0.0)["peak_memory_gib"], abs=1e-5)
