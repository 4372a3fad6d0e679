"""The figures of a report agree with what the page, ``explain`` and the simulator say of the same program."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.backends.simulator import simulate
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level
from arachnec.ir.parser import parse_file
from arachnec.report import plan_report, synchronisation_ms
from arachnec.views.timeline import planned

BUCKETS = Path(__file__).parents[1] / "golden" / "check" / "buckets_valid.cascade"


def test_sums_that_hide_behind_backwards_do_not_count_in_the_iteration() -> None:
    program = parse_file(BUCKETS)
    report = plan_report(program, 0.0)
    assert program.level is Level.LOWERED
    assert report["iteration_ms"] == pytest.approx(planned(program).end)
    assert report["iteration_ms"] == pytest.approx(simulate(program).iteration_ms, rel=0.05)
    assert report["iteration_ms"] < report["makespan_ms"] + 0.9 * synchronisation_ms(program, CostModel(program))
