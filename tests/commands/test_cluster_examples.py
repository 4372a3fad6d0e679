"""Every example cluster, from the command line: a plan that checks, and a simulation of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arachnec.backends.simulator import simulate
from arachnec.cli import run
from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.validate import validate_schedule

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.toml"))
TABLE = ROOT / "examples" / "tables" / "four_tasks.json"
TOKENS = (32_760, 14_040, 7_800, 3_600, 3_600, 1_560)


def linear(coefficient: float, unit: str) -> Formula:
    return Formula((Term(coefficient, (("B", 1), ("S", 1))),), unit)


def iteration(path: Path) -> Module:
    """Six clips on a transformer of a billion parameters, not yet costed."""
    quadratic = Term(1e-6, (("B", 1), ("S", 2)))
    attrs = Attributes.of(
        params=1_000_000_000,
        dtype="bf16",
        heads=12,
        attentions=30,
        flops=Formula((quadratic, Term(2e-3, (("B", 1), ("S", 1)))), "TFLOP"),
        traffic=linear(3e-4, "GiB"),
        saved=linear(1e-4, "GiB"),
        state=Quantity(2.0, "GiB"),
    )
    clips = tuple(Clip(number, 17, 480, 832, 100, tokens) for number, tokens in enumerate(TOKENS))
    cascades = tuple(Cascade(str(c.id), Phase.TRAIN, "dit", (c.id,), 1, c.tokens, c.text) for c in clips)
    stage = Stage("dit", True, attrs)
    return Module("example", Level.PARTITIONED, parse_cluster(path), clips, (stage,), cascades=cascades)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_cluster_gets_a_plan_that_checks_and_simulates(path: Path) -> None:
    module = checked(Pipeline.parse("annotate,schedule-z3{budget=0ms},place,lower").run(iteration(path)))
    assert validate_schedule(module) == []
    simulation = simulate(module)
    assert simulation.iteration_ms >= quantity(module.attrs["makespan"]) * (1 - 1e-9)
    assert max(simulation.peak_memory_gib) <= quantity(parse_cluster(path).attrs["memory"])


# the table's tasks were measured on two devices and more
SEVERAL = [path for path in EXAMPLES if parse_cluster(path).world > 1]


@pytest.mark.parametrize("path", SEVERAL, ids=lambda path: path.stem)
def test_a_table_is_planned_on_an_example_cluster(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(TABLE), "--cluster", str(path), "--passes", "schedule-z3{budget=0ms},place", "--json"]
    assert run(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan_ms"] >= report["bound_ms"] * (1 - 1e-9)
    assert len(report["cascades"]) == 8


def test_an_iteration_is_faster_on_faster_devices() -> None:
    def time_on(name: str) -> float:
        path = next(path for path in EXAMPLES if path.stem == name)
        module = Pipeline.parse("annotate,schedule-z3{budget=0ms},place,lower").run(iteration(path))
        return simulate(module).iteration_ms

    assert time_on("h100x16") < time_on("a100x16") < time_on("h20x16")
