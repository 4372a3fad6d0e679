"""A step of sampling takes what a profile measured of its size, its batch and its ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.cost.model import CostModel
from arachnec.cost.profile import Measurement, fit_profile, write_profile
from arachnec.cost.timed_steps import TimedStep, correction, interpolated
from arachnec.ir.nodes import Cascade, Module, Phase
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.sampling import planned_steps
from arachnec.ir.values import Attributes
from arachnec.passes.infra.pipeline import Pipeline
from tests.planning.test_sampling_plan import SHAPES, request, tokens, traced

SHAPE = SHAPES[1]
TOKENS = tokens(request(0, SHAPE))
# a batch of two takes 3 times one, a batch of four 5 times; two ranks take 0.75, and with two predictions 2
RUNS = [
    Measurement(1, TOKENS, 8, 1, 100.0),
    Measurement(2, TOKENS, 8, 1, 300.0),
    Measurement(4, TOKENS, 8, 1, 500.0),
    Measurement(1, TOKENS, 8, 2, 75.0, 4.0, 1e9),
    Measurement(2, TOKENS, 8, 2, 200.0, 4.0, 2e9),
]


@pytest.fixture
def costed(tmp_path: Path) -> Module:
    profile = fit_profile([(name, "forward", RUNS) for name in ("large", "small")], machine="m", device="h100-80g")
    write_profile(profile, tmp_path / "profile.json")
    rows = [request(0, SHAPE), request(1, SHAPE, guidance=2.0), request(2, SHAPES[0])]
    return Pipeline.parse(f"segment,annotate{{profile={tmp_path / 'profile.json'}}}").run(traced(rows, []))


def of(module: Module, number: int) -> Cascade:
    return next(c for c in module.cascades if c.name == f"r{number}.0")


def test_a_step_takes_what_was_measured_at_its_batch_and_degree(costed: Module) -> None:
    cost = CostModel(costed)
    alone, guided = of(costed, 0), of(costed, 1)
    steps = planned_steps(alone)
    pair = replace(guided, batch=2)
    for cascade, degree, ms in ((alone, 1, 100), (guided, 1, 300), (pair, 1, 500), (alone, 2, 75), (guided, 2, 200)):
        assert cost.time(cascade, degree, side=1) == pytest.approx(steps * ms, rel=1e-4), (cascade.batch, degree)
    # a rank for each branch: each takes what one prediction does
    assert cost.time(guided, 2, side=2) >= steps * 100
    assert cost.time(guided, 2, side=2) == pytest.approx(steps * 100, rel=0.05)


def test_between_batches_lies_what_is_between_and_other_sizes_keep_their_formula(costed: Module) -> None:
    cost, plain = CostModel(costed), CostModel(untimed(costed))
    three = replace(of(costed, 0), batch=3)
    formula = plain.time(three, 1)
    low, high = (plain.time(replace(three, batch=batch), 1) for batch in (2, 4))
    steps = planned_steps(three)
    assert cost.time(three, 1) == pytest.approx(formula * (300 * steps / low + 500 * steps / high) / 2)
    other = of(costed, 2)
    assert cost.time(other, 1) == pytest.approx(plain.time(other, 1))


def untimed(module: Module) -> Module:
    stages = tuple(replace(stage, attrs=stage.attrs.updated(timed=None)) for stage in module.stages)
    return replace(module, stages=stages)


def test_what_was_measured_survives_printing(costed: Module) -> None:
    assert parse_module(print_module(costed)) == costed
    assert costed.stage("large").attrs["timed"] and "timed" not in costed.stage("text").attrs


@pytest.mark.parametrize(("at", "value"), [(1, 2.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 4.5), (9, 5.0)])
def test_points_are_joined_by_lines(at: int, value: float) -> None:
    assert interpolated([(2, 2.0), (4, 4.0), (6, 5.0)], at) == value
    assert interpolated([], at) == 1.0


def test_a_degree_that_was_not_timed_costs_what_its_batch_did_on_one_rank() -> None:
    cascade = Cascade("0", Phase.DENOISE, "dit", (0,), 2, 100, 8, (), Attributes.of(steps=(0, 3), branches=1))
    rows = [TimedStep(1, 2, 100, 8, 30.0), TimedStep(2, 2, 100, 8, 40.0), TimedStep(1, 2, 999, 8, 7.0)]

    def ratio(degree: int, rows: list[TimedStep]) -> float:
        return correction(cascade, degree, rows, lambda _, ranks: 10.0 * ranks)

    assert (ratio(1, rows), ratio(2, rows), ratio(4, rows)) == (3.0, 2.0, 3.0)
    assert ratio(4, rows[1:2]) == 1.0, "of two ranks nothing follows for four"
    assert ratio(4, rows[2:]) == 1.0, "nor of another length"
    assert correction(replace(cascade, phase=Phase.ENCODE), 1, rows, lambda *_: 10.0) == 1.0


def test_what_one_machine_took_says_nothing_of_ranks_on_two(costed: Module) -> None:
    pod = costed.cluster
    assert pod is not None and pod.gpus == 4
    two = replace(costed, cluster=replace(pod, attrs=pod.attrs.updated(nodes=2)))
    cost, plain, alone = CostModel(two), CostModel(untimed(two)), of(two, 0)
    assert cost.time(alone, 2, ranks=(3, 4)) == pytest.approx(plain.time(alone, 2, ranks=(3, 4)))
    measured, formula = (model.time(alone, 2, ranks=(4, 5)) for model in (cost, plain))
    assert measured == pytest.approx(planned_steps(alone) * 75, rel=1e-4)
    assert formula != pytest.approx(measured, rel=0.01)
