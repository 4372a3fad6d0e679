"""What a profile makes of measurements, and what the passes make of a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.cost.profile import (
    LinkProfile,
    Measurement,
    Profile,
    Synchronisation,
    exponent_of,
    find_clip_time,
    find_steps,
    fit,
    fit_profile,
    formula_of,
    only_length,
    read_profile,
    write_profile,
)
from arachnec.ir.nodes import Cluster, Level, Module, Stage, quantity
from arachnec.ir.stage_sizes import crowding, gradient_bytes
from arachnec.ir.values import Attributes, Formula
from arachnec.passes.annotate import Annotate

ALPHA, BETA = 0.3, 2e6  # ms a message, bytes a ms


def alone(batch: int, tokens: int, text: int = 20) -> Measurement:
    ms = 2e-6 * batch * tokens**2 + 1e-3 * batch * tokens + 3.0 * batch + 10.0
    return Measurement(batch, tokens, text, 1, ms)


def shared(tokens: int, messages: float, moved: float) -> Measurement:
    one = alone(1, tokens)
    computing = (one.ms - 13.0) / 2 + 13.0  # what clips and calls cost is not shared
    return Measurement(1, tokens, 20, 2, computing + ALPHA * messages + moved / BETA, messages, moved)


ALONE = [alone(1, 100, 5), alone(4, 100, 30), alone(1, 1000, 90), alone(2, 1000), alone(1, 5000, 60), alone(1, 300)]
SHARED = [shared(100, 9, 1e5), shared(1000, 9, 1e6), shared(5000, 13, 5e6)]


def profile(path: Path) -> Profile:
    end = Synchronisation("dit", 4, 4_000_000, reduce_ms=12.0, step_ms=7.0)
    fitted = fit_profile(
        [("dit", "forward", ALONE + SHARED), ("dit", "backward", ALONE)],
        machine="m",
        device="cpu",
        synchronisation=[end],
    )
    write_profile(fitted, path)
    assert read_profile(path) == fitted
    return fitted


def encoded(ms: float, tokens: int, caption: int, batch: int = 1, /, **sizes: int) -> Measurement:
    return Measurement(batch, tokens, caption, 1, ms, sizes=sizes)


PIXELS = [
    encoded(10, 12, 15, frames=1, width=64),
    encoded(28, 15, 20, frames=1, width=80),
    encoded(100, 60, 61, frames=17, width=64),
    encoded(455, 420, 70, frames=81, width=80),
]


def test_a_fit_without_coefficients_costs_nothing() -> None:
    assert formula_of({})(B=3.0, S=5.0) == 0.0


def test_an_encoders_formula_has_no_terms_of_what_it_is_not_given() -> None:
    assert not any("T" in name for name in fit(PIXELS).coefficients)
    caption = fit([encoded(3, 12, 15, text=15), encoded(6, 420, 70, text=70), encoded(4, 60, 20, text=20)])
    assert not any("S" in name for name in caption.coefficients)
    assert caption.exponent is None
    padded = fit([encoded(3, 12, 15), encoded(3.2, 420, 70)])
    assert set(padded.coefficients) <= {"B", "1"}


def test_one_clip_whose_time_depends_on_its_pixels_gives_an_encoder_terms_of_its_tokens() -> None:
    mixed = fit([encoded(12, 12, 15, text=15), encoded(60, 60, 20, frames=17), encoded(420, 420, 70, frames=81)])
    assert mixed.coefficients["B*S"] == pytest.approx(1.0)


def test_the_steps_of_a_stage_are_its_own_forwards() -> None:
    other = [Measurement(1, 10, 0, 1, 7.0)]
    rows = [("large", "forward", ALONE), ("large", "backward", other), ("small", "forward", other)]
    fitted = fit_profile(rows, machine="m", device="cpu")
    assert find_steps(fitted, "large") == tuple(ALONE)
    assert find_steps(fitted, "small") == tuple(other)
    assert find_steps(fitted, "none") == ()


def test_a_clip_takes_what_was_measured_of_clips_equal_in_all_that_decides() -> None:
    batch = encoded(300, 12, 15, 4, frames=1, width=64)
    again = encoded(12, 12, 99, frames=1, width=64)
    padded = [encoded(3, 12, 15), encoded(5, 420, 70)]
    fitted = fit_profile(
        [("vae", "forward", [*PIXELS, batch, again]), ("text", "forward", padded), ("dit", "forward", ALONE)],
        machine="m",
        device="cpu",
    )
    clip = {"frames": 1, "height": 48, "width": 64, "text": 30}
    assert find_clip_time(fitted, "vae", clip) == pytest.approx(11)
    assert find_clip_time(fitted, "vae", clip | {"width": 96}) is None
    assert find_clip_time(fitted, "text", clip | {"width": 96}) == pytest.approx(4)
    assert find_clip_time(fitted, "dit", clip) is None


def test_a_profile_from_before_sizes_were_kept_is_read(tmp_path: Path) -> None:
    fitted = fit_profile([("vae", "forward", PIXELS), ("dit", "forward", ALONE)], machine="m", device="cpu")
    content = msgspec.json.decode(msgspec.json.encode(fitted))
    for stage in content["stages"]:
        for row in stage["measurements"]:
            del row["sizes"]
    (tmp_path / "old.json").write_bytes(msgspec.json.encode(content))
    read = read_profile(tmp_path / "old.json")
    assert [row.ms for row in read.stages[0].measurements] == [row.ms for row in PIXELS]
    assert find_clip_time(read, "vae", {"frames": 1, "height": 48, "width": 64, "text": 30}) is None


def test_plain_messages_count_only_where_those_of_cascades_are_of_one_size() -> None:
    plain = LinkProfile(latency=10.0, intra=5.0)

    def links(shared: list[Measurement]) -> LinkProfile:
        fitted = fit_profile([("dit", "forward", ALONE + shared)], machine="m", device="cpu", links=plain)
        assert fitted.links is not None
        return fitted.links

    assert links(SHARED).latency == pytest.approx(1e3 * ALPHA, rel=1e-3)
    assert links(SHARED).intra == pytest.approx(BETA * 1e3 / 1e9, rel=1e-3)
    assert links([shared(1000, 9, 1e6)] * 3).intra == plain.intra
    assert links([shared(1000, 9, 1e6)] * 3).latency == pytest.approx(1e3 * (ALPHA + 1e6 / 9 * (1 / BETA - 1e-6 / 5)))


def test_the_gradient_all_reduce_takes_the_time_that_was_measured(tmp_path: Path) -> None:
    profile(tmp_path / "p.json")
    module = costed(tmp_path / "p.json", parse_cluster("1x4:h100-80g"))
    (stage,) = module.stages
    assert gradient_bytes(stage) == 4_000_000
    assert CostModel(module).reduce_time(stage, (0, 1, 2, 3)) == pytest.approx(12.0)
    assert CostModel(module).step_time(stage) == pytest.approx(7.0)


def test_a_sharded_optimizer_halves_the_synchronisation_and_divides_the_step(tmp_path: Path) -> None:
    profile(tmp_path / "p.json")
    module = costed(tmp_path / "p.json", parse_cluster("1x4:h100-80g"))
    (stage,) = module.stages
    sharded = replace(stage, attrs=stage.attrs.updated(sharded=4))
    cost = CostModel(module)
    assert cost.reduce_time(sharded, (0, 1, 2, 3)) == pytest.approx(6.0)
    assert cost.step_time(sharded) == pytest.approx(7.0 / 4)


def costed(path: Path, cluster: Cluster) -> Module:
    stage = Stage("dit", True, Attributes.of(params=1_000_000, dtype="f32", flops=Formula((), "TFLOP")))
    return Annotate(str(path)).run(Module("m", Level.PARTITIONED, cluster, (), (stage,)))


def test_ranks_that_share_cores_are_planned_as_if_all_of_them_computed(tmp_path: Path) -> None:
    profile(tmp_path / "p.json")
    own = parse_cluster("4:cpu")
    own = replace(own, attrs=own.attrs.updated(cores=4))
    crowded = replace(own, attrs=own.attrs.updated(cores=2))
    assert (crowding(own), crowding(crowded)) == (1.0, 2.0)
    one, two = costed(tmp_path / "p.json", own).stages[0], costed(tmp_path / "p.json", crowded).stages[0]
    first, second = one.attrs["forward"], two.attrs["forward"]
    assert isinstance(first, Formula)
    assert isinstance(second, Formula)
    assert second(B=1, S=1000, T=20) == pytest.approx(2 * first(B=1, S=1000, T=20))
    assert quantity(two.attrs["update"]) == pytest.approx(2 * quantity(one.attrs["update"]))


def test_cpu_ranks_of_a_short_form_share_the_cores_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert "cores" not in parse_cluster("3:cpu").attrs
    assert parse_cluster("4:cpu").attrs["cores"] == 3
    assert "cores" not in parse_cluster("4:h100-80g").attrs


ONE_SHAPE = [alone(1, 300), alone(4, 300), alone(2, 300)]


def test_clips_of_one_shape_are_costed_as_measured(tmp_path: Path) -> None:
    fitted = fit_profile([("dit", "forward", ONE_SHAPE), ("dit", "backward", ONE_SHAPE)], machine="m", device="cpu")
    for entry in fitted.stages:
        assert only_length(entry) == 300
        assert entry.fit.residuals == pytest.approx([0.0] * 3, abs=1e-6)
    assert only_length(profile(tmp_path / "p.json").stages[0]) is None
    assert exponent_of(fitted, "dit") is None
