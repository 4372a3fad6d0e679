"""What a rank counts as computing: weight gradients that come apart from their backward are part of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.reporting.report import PlannedTimes, busy_ms
from arachnec.ir.parser import parse_module
from arachnec.runtime.step_progress import Interval

PROGRAM = Path(__file__).parents[1] / "golden" / "check" / "pipeline_zero_bubble.cascade"
OPS = ("encode", "wait", "forward", "backward", "weight", "reduce", "step")


def test_a_split_backward_is_busy_for_both_of_its_halves() -> None:
    times = PlannedTimes.of(parse_module(PROGRAM.read_text(), str(PROGRAM)))
    assert times.busy == pytest.approx({0: 4 * 30.0, 1: 4 * 30.0})  # 10 ms each of four forwards, backwards, weights
    measured = [Interval(0, op, "x", 10.0 * place, 10.0 * place + 1) for place, op in enumerate(OPS)]
    assert busy_ms(measured) == pytest.approx(4.0)
