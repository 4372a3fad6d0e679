"""The ablation of placement plans each arm for its own pipeline."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from arachnec.ir.nodes import Module
from arachnec.passes import Pipeline

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ablations() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("ablations")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_both_arms_of_placement_run_the_whole_pipeline_from_the_traced_module(ablations: ModuleType) -> None:
    ran: list[tuple[str, str]] = []

    def run(self: Pipeline, module: Module) -> Module:
        ran.append((module.level.word, str(self)))
        return module

    with (
        mock.patch.object(Pipeline, "run", run),
        mock.patch.object(ablations, "simulate", lambda module: SimpleNamespace(iteration_ms=1.0)),
    ):
        row = next(ablations.placement(ablations.Planner(500)))
    assert (row.on, row.off) == (1.0, 1.0)
    (level, on), (blind_level, blind) = ran
    assert level == blind_level == "traced"
    assert blind == on.replace("place,", "place{topology=false},")
    assert "annotate,schedule-z3{steps=500},place" in on
