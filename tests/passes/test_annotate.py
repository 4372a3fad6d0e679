"""Formulas from a data sheet and from a profile."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Symbol, Term
from arachnec.passes.annotate import Annotate
from arachnec.passes.cluster_file import parse_cluster
from arachnec.passes.partition import Partition
from arachnec.passes.profile_file import (
    LinkProfile,
    Measurement,
    exponent_of,
    fit,
    fit_profile,
    formula_of,
    predict,
    read_profile,
    write_profile,
)

FLOPS = Formula((Term(1e-9, (("B", 1), ("S", 2))), Term(2e-5, (("B", 1), ("S", 1)))), "TFLOP")


def module() -> Module:
    dit = Stage("dit", True, Attributes.of(flops=FLOPS, blocks=((Symbol("Block"), 10),)))
    train = Cascade("0", Phase.TRAIN, "dit", (), 1, 1000, 16)
    return Module("m", Level.PARTITIONED, parse_cluster("8:h100-80g"), stages=(dit,), cascades=(train,))


def formula(stage: Stage, name: str) -> Formula:
    value = stage.attrs[name]
    assert isinstance(value, Formula)
    return value


def measured(b: int, s: int, t: int, d: int = 1) -> Measurement:
    return Measurement(b, s, t, d, (2e-6 * b * s * s + 1e-6 * b * s * t + 3e-3 * b * s) / d + 1e-2 * b * t + 5.0)


RUNS = [
    measured(b, s, t, d)
    for b, s, t, d in [
        (1, 500, 16, 1),
        (1, 1000, 64, 1),
        (2, 2000, 16, 1),
        (1, 8000, 32, 1),
        (1, 30000, 64, 1),
        (1, 30000, 16, 4),
        (4, 1000, 128, 1),
        (1, 16000, 77, 2),
    ]
]


def test_a_data_sheet_gives_work_over_sustained_speed_and_a_backward_of_twice_that() -> None:
    made = Annotate().run(module()).stages[0]
    assert made.attrs["costs"] == "data sheet"
    work = FLOPS(B=1, S=1000, T=16)
    assert formula(made, "forward")(B=1, S=1000) == pytest.approx(work / 316.48 * 1e3 + 10 * 0.15)
    assert formula(made, "backward")(B=1, S=1000) == pytest.approx(2 * formula(made, "forward")(B=1, S=1000))


def test_another_device_than_the_clusters_may_be_named() -> None:
    faster, slower = Annotate().run(module()).stages[0], Annotate(profile="h20").run(module()).stages[0]
    assert formula(slower, "forward")(B=1, S=90_000) > 3 * formula(faster, "forward")(B=1, S=90_000)


def test_a_fit_finds_the_formula_behind_exact_measurements() -> None:
    found = fit(RUNS)
    assert found.coefficients["B*S^2"] == pytest.approx(2e-6, rel=1e-3)
    assert found.coefficients["B*S"] == pytest.approx(3e-3, rel=1e-2)
    assert max(map(abs, found.residuals)) < 1e-6
    assert found.held_out is not None and found.held_out < 1e-2
    assert formula_of(found.coefficients)(B=1, S=777, T=10) == pytest.approx(measured(1, 777, 10).ms, rel=1e-3)


@given(st.lists(st.floats(0.9, 1.1), min_size=len(RUNS), max_size=len(RUNS)))
def test_a_fit_of_noisy_measurements_has_no_negative_term_and_says_how_far_it_is_off(noise: list[float]) -> None:
    runs = [
        Measurement(run.batch, run.tokens, run.text, run.degree, run.ms * factor)
        for run, factor in zip(RUNS, noise, strict=True)
    ]
    found = fit(runs)
    assert all(value > 0 for value in found.coefficients.values())
    for run, residual in zip(runs, found.residuals, strict=True):
        assert predict(found.coefficients, run) == pytest.approx(run.ms * (1 + residual))
        assert abs(residual) < 0.25


def test_the_exponent_is_2_for_pure_attention_and_1_for_pure_matrix_products() -> None:
    def runs(power: int) -> list[Measurement]:
        return [Measurement(1, s, 0, 1, 1e-5 * s**power) for s in (1000, 4000, 9000)]

    assert fit(runs(2)).exponent == pytest.approx(2, abs=1e-3)
    assert fit(runs(1)).exponent == pytest.approx(1, abs=1e-3)


def test_a_fit_needs_measurements() -> None:
    with pytest.raises(ValueError, match="measurements"):
        fit([])


def profile_at(path: Path) -> Path:
    links = LinkProfile(latency=80.0, intra=1.5)
    profile = fit_profile([("dit", "forward", RUNS), ("dit", "backward", RUNS)], machine="m", device="cpu", links=links)
    write_profile(profile, path)
    assert read_profile(path) == profile
    return path


def test_a_profile_stands_instead_of_the_data_sheet_and_brings_its_links(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "p.json")
    made = Annotate(profile=str(path)).run(module())
    assert made.stages[0].attrs["costs"] == "profile"
    assert formula(made.stages[0], "forward")(B=1, S=5000, T=40) == pytest.approx(measured(1, 5000, 40).ms, rel=1e-3)
    assert made.cluster is not None
    assert quantity(made.cluster.attrs["latency"]) == 80.0
    assert quantity(made.cluster.attrs["inter"]) == 50.0


def test_partition_takes_its_exponent_from_a_profile(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "p.json")
    assert 1 < exponent_of(read_profile(path), "dit") < 2
    with pytest.raises(UserError, match="no stage `vae`"):
        exponent_of(read_profile(path), "vae")
    assert Partition(p="profile", profile=str(path))


@pytest.mark.parametrize(
    "text", ["", "{", '{"machine": "m"}', '{"machine": "m", "device": "cpu", "stages": [], "x": 1}']
)
def test_a_broken_profile_gets_one_message(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Annotate(profile=str(path)).run(module())
    assert "is not a profile" in render(caught.value.diagnostics[0])
