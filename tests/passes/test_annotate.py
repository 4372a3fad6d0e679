"""Formulas from device specs and from a profile."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.cost.profile import (
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
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Cascade, Clip, Level, Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Quantity, Symbol, Term
from arachnec.passes.annotate import Annotate
from arachnec.passes.partition import Partition, cascades

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


def test_device_specs_give_work_over_sustained_speed_and_a_backward_of_twice_that() -> None:
    stage = Annotate().run(module()).stages[0]
    assert stage.attrs["costs"] == "device specs"
    work = FLOPS(B=1, S=1000, T=16)
    assert formula(stage, "forward")(B=1, S=1000) == pytest.approx(work / 316.48 * 1e3 + 10 * 0.15)
    assert formula(stage, "backward")(B=1, S=1000) == pytest.approx(2 * formula(stage, "forward")(B=1, S=1000))


def test_another_device_than_the_clusters_may_be_named() -> None:
    faster, slower = Annotate().run(module()).stages[0], Annotate(profile="h20").run(module()).stages[0]
    assert formula(slower, "forward")(B=1, S=90_000) > 3 * formula(faster, "forward")(B=1, S=90_000)


def test_a_fit_finds_the_formula_behind_exact_measurements() -> None:
    curve = fit(RUNS)
    assert curve.coefficients["B*S^2"] == pytest.approx(2e-6, rel=1e-3)
    assert curve.coefficients["B*S"] == pytest.approx(3e-3, rel=1e-2)
    assert max(map(abs, curve.residuals)) < 1e-6
    assert curve.held_out is not None and curve.held_out < 1e-2
    assert formula_of(curve.coefficients)(B=1, S=777, T=10) == pytest.approx(measured(1, 777, 10).ms, rel=1e-3)


@given(st.lists(st.floats(0.9, 1.1), min_size=len(RUNS), max_size=len(RUNS)))
def test_a_fit_of_noisy_measurements_has_no_negative_term_and_says_how_far_it_is_off(noise: list[float]) -> None:
    runs = [
        Measurement(run.batch, run.tokens, run.text, run.degree, run.ms * factor)
        for run, factor in zip(RUNS, noise, strict=True)
    ]
    curve = fit(runs)
    assert all(value > 0 for value in curve.coefficients.values())
    for run, residual in zip(runs, curve.residuals, strict=True):
        assert predict(curve.coefficients, run) == pytest.approx(run.ms * (1 + residual))
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
    links = LinkProfile(latency=80.0, intra=1.5, host=6.0)
    profile = fit_profile([("dit", "forward", RUNS), ("dit", "backward", RUNS)], machine="m", device="cpu", links=links)
    write_profile(profile, path)
    assert read_profile(path) == profile
    return path


def test_a_profile_stands_instead_of_device_specs_and_brings_its_links(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "p.json")
    annotated = Annotate(profile=str(path)).run(module())
    assert annotated.cluster is not None
    assert annotated.cluster.attrs.get("host_link") == (Quantity(6.0, "GB/s") if annotated.cluster.nodes == 1 else None)
    assert annotated.stages[0].attrs["costs"] == "profile p.json"
    assert formula(annotated.stages[0], "forward")(B=1, S=5000, T=40) == pytest.approx(
        measured(1, 5000, 40).ms, rel=1e-3
    )
    assert annotated.cluster is not None
    assert quantity(annotated.cluster.attrs["latency"]) == 80.0
    assert quantity(annotated.cluster.attrs["inter"]) == 50.0


def encoders_profile(path: Path) -> Path:
    def rows(*pairs: tuple[float, dict[str, int]]) -> list[Measurement]:
        return [Measurement(1, 100, 20, 1, ms, sizes=sizes) for ms, sizes in pairs]

    vae = rows((30.0, {"frames": 17, "height": 48, "width": 64}), (90.0, {"frames": 81, "height": 48, "width": 64}))
    text = rows((3.0, {"text": 20}), (5.0, {"text": 30}))
    dit = [("dit", phase, RUNS) for phase in ("forward", "backward")]
    fitted = fit_profile([("vae", "forward", vae), ("text", "forward", text), *dit], machine="m", device="cpu")
    write_profile(fitted, path)
    return path


def encoded_module(*clips: Clip) -> Module:
    """One micro-batch of these clips."""
    output = Formula((Term(1e-7, (("B", 1), ("S", 1))),), "GiB")
    frozen = [Stage(name, False, Attributes.of(flops=FLOPS, output=output)) for name in ("vae", "text")]
    stages = (*frozen, *module().stages)
    four = parse_cluster("4:cpu")
    four = replace(four, attrs=four.attrs.updated(cores=2))
    return Module("m", Level.PARTITIONED, four, clips, stages, cascades=cascades([clips], stages))


def per_clip(annotated: Module) -> dict[str, float]:
    return {c.stage: quantity(c.attrs["per_clip"]) for c in annotated.cascades if "per_clip" in c.attrs}


def test_a_profile_of_another_precision_is_refused(tmp_path: Path) -> None:
    def in_precision(dtype: str) -> Module:
        whole = module()
        return replace(whole, stages=tuple(replace(s, attrs=s.attrs.updated(dtype=dtype)) for s in whole.stages))

    both = [("dit", "forward", RUNS), ("dit", "backward", RUNS)]
    write_profile(fit_profile(both, machine="m", device="cpu", dtype="f32"), tmp_path / "p.json")
    annotate = Annotate(profile=str(tmp_path / "p.json"))
    assert annotate.run(in_precision("f32")).stages[0].attrs["costs"] == "profile p.json"
    with pytest.raises(UserError) as refused:
        annotate.run(in_precision("bf16"))
    assert "measured in fp32, and stage `@dit` computes in bf16" in str(refused.value)
    assert "arachnec profile --dtype bf16" in render(refused.value.diagnostics[0])
    assert Annotate(profile=str(profile_at(tmp_path / "old.json"))).run(in_precision("bf16")), "not noted"


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    runs = [("another", "forward", RUNS), ("another", "backward", RUNS)]
    write_profile(fit_profile(runs, machine="m", device="cpu"), tmp_path / "p.json")
    with pytest.raises(UserError, match="the profile has no stage `dit`"):
        Annotate(profile=str(tmp_path / "p.json")).run(module())


def test_an_encoders_cascade_of_measured_clips_takes_what_was_measured(tmp_path: Path) -> None:
    path = str(encoders_profile(tmp_path / "p.json"))
    clips = [Clip(number, 17, 48, 64, 20, 100) for number in range(3)]
    annotated = Annotate(path).run(encoded_module(*clips))
    assert per_clip(annotated) == {"vae": 60.0, "text": 6.0}  # two ranks share a core
    vae = annotated.cascades[0]
    times = [CostModel(annotated).time(vae, degree) for degree in (1, 2, 3)]
    assert times[0] == pytest.approx(180.0)
    assert times[1] == pytest.approx(120.0, rel=0.05)  # and the ranks gather the output
    assert times[2] == pytest.approx(60.0, rel=0.05)


def test_each_encoder_is_looked_up_by_what_decides_its_time(tmp_path: Path) -> None:
    path = str(encoders_profile(tmp_path / "p.json"))
    assert per_clip(Annotate(path).run(encoded_module(Clip(0, 17, 48, 64, 25, 100)))) == {"vae": 60.0}
    assert per_clip(Annotate(path).run(encoded_module(Clip(0, 33, 48, 64, 30, 100)))) == {"text": 10.0}
    mixed = Clip(0, 17, 48, 64, 20, 100), Clip(1, 81, 48, 64, 20, 300)
    assert per_clip(Annotate(path).run(encoded_module(*mixed))) == {"text": 6.0}


def test_clips_that_were_not_measured_take_the_formulas_time(tmp_path: Path) -> None:
    path = str(encoders_profile(tmp_path / "p.json"))
    annotated = Annotate(path).run(encoded_module(Clip(0, 33, 48, 64, 25, 100)))
    assert per_clip(annotated) == {}
    assert CostModel(annotated).time(annotated.cascades[0], 1) == formula(annotated.stages[0], "forward")(
        B=1, S=100, T=25
    )


def test_device_specs_know_no_measured_clips(tmp_path: Path) -> None:
    path = str(encoders_profile(tmp_path / "p.json"))
    annotated = Annotate(path).run(encoded_module(Clip(0, 17, 48, 64, 20, 100)))
    assert per_clip(Annotate().run(replace(annotated, level=Level.PARTITIONED))) == {}


def test_partition_takes_its_exponent_from_a_profile(tmp_path: Path) -> None:
    path = profile_at(tmp_path / "p.json")
    assert 1 < exponent_of(read_profile(path), "dit") < 2
    with pytest.raises(UserError, match="no stage `vae`"):
        exponent_of(read_profile(path), "vae")
    assert Partition(p="profile", profile=str(path))


def test_a_profile_of_one_length_leaves_the_exponent_to_the_flops(tmp_path: Path) -> None:
    path = str(tmp_path / "p.json")
    runs = [measured(b, 1000, 16) for b in (1, 2, 4)]
    write_profile(fit_profile([("dit", "forward", runs), ("dit", "backward", runs)], machine="m", device="cpu"), path)
    begin = replace(module(), level=Level.TRACED, cascades=())
    equal = replace(begin, clips=tuple(Clip(n, 17, 48, 64, 16, 1000) for n in range(4)))
    mixed = replace(begin, clips=(*equal.clips, Clip(4, 33, 48, 64, 16, 4000)))
    for clips in (equal, mixed):
        partitioned = Partition(profile=path).run(clips)
        assert partitioned == Partition().run(clips)
        costed = Annotate(path).run(partitioned)
        assert costed.stages[0].attrs["costs"] == "profile p.json"
        assert CostModel(costed).time(costed.cascades[0], 1) > 0
    assert Partition(p="profile", profile=path).run(equal) == Partition().run(equal)
    with pytest.raises(UserError, match="one length only"):
        Partition(p="profile", profile=path).run(mixed)


@pytest.mark.parametrize(
    "text", ["", "{", '{"machine": "m"}', '{"machine": "m", "device": "cpu", "stages": [], "x": 1}']
)
def test_a_broken_profile_gets_one_message(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        Annotate(profile=str(path)).run(module())
    assert "is not a profile" in render(caught.value.diagnostics[0])
