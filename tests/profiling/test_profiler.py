"""What `arachnec profile` measures, on two gloo ranks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from arachnec.backends.cascade_step import in_training_precision
from arachnec.cost.profile import fit_profile
from arachnec.executable.training_options import Training
from arachnec.models.file import load_model_file
from arachnec.profiling.in_turns import SHAPES, Budget, choose_points
from arachnec.profiling.local import Measured
from arachnec.profiling.profiler import Profiler
from tests.distributed.executor_cases import ENCODER, MODEL, clip
from tests.distributed.harness import run_ranks

FRAMES = range(1, 9)  # more than there are SHAPES
CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 1, 24, 16), clip("e", 7))


def profiled(model: str, at_once: int) -> Measured:
    profiler = Profiler(load_model_file(model), CLIPS, torch.device("cpu"), at_once)
    weights = [value.clone() for value in profiler.parameters.values()]
    profiler.round()
    profiler.forget()
    profiler.round()
    profiler.round()
    assert all(torch.equal(a, b) for a, b in zip(weights, profiler.parameters.values(), strict=True))
    return profiler.measured()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiler") / "model.py"
    path.write_text(MODEL + ENCODER, encoding="utf-8")
    return path


def test_every_stage_and_phase_is_measured_alone_and_shared_and_so_is_the_end(model: Path) -> None:
    measured, other = run_ranks(2, profiled, str(model), 2, timeout=600.0)
    assert measured.device == "cpu"
    whole = [(stage, phase) for stage, phase, _ in measured.stages if "/" not in stage]
    assert whole == [("vae", "forward"), ("dit", "forward"), ("dit", "backward")]
    of_block = [phase for stage, phase, _ in measured.stages if stage == "dit/Block"]
    assert of_block == ["forward", "backward", "activation", "weight"]
    assert {stage for stage, _, _ in measured.stages} == {
        "vae",
        "dit",
        "dit/batch",
        "dit/Block",
        "dit/first",
        "dit/last",
    }
    for stage, _, rows in measured.stages:
        assert all(row.ms > 0 for row in rows)
        assert {row.batch for row in rows} > {1}
        assert {row.degree for row in rows} == ({1, 2} if stage == "dit" else {1})
        # four collectives for two attentions, and a gather
        assert {row.messages for row in rows if row.degree == 2} <= {5.0}
        assert all((row.moved > 0) == (row.degree > 1) for row in rows)
    (end,) = measured.synchronisation
    assert end.reduce_ms > 0
    assert end.step_ms > 0
    assert [[row.ms for row in rows] for *_, rows in measured.stages] == [
        [row.ms for row in rows] for *_, rows in other.stages
    ]
    sizes = {op: [run.bytes for run in measured.collectives if run.op == op] for op in ("all-gather", "reduce-scatter")}
    assert sizes["all-gather"] == sizes["reduce-scatter"]
    assert sizes["all-gather"][0] == 4096
    assert len(sizes["all-gather"]) == 2
    assert [run.bytes for run in measured.collectives if run.op == "handoff"] == [8 << 10, 2 << 20]
    assert all(run.ms > 0 and run.ranks == 2 for run in measured.collectives)
    assert all(run.overlapped is not None and run.overlapped >= 0 for run in measured.collectives)
    profile = fit_profile(
        measured.stages, machine="m", device="cpu", links=measured.links, synchronisation=measured.synchronisation
    )
    assert profile.links is not None
    assert profile.links.host is not None
    assert profile.links.host > 0
    assert profile.links.all_reduce is not None


def test_ranks_without_a_core_wait_and_plain_messages_stand_for_shared_cascades(model: Path) -> None:
    measured, _ = run_ranks(2, profiled, str(model), 1, timeout=600.0)
    assert all(row.degree == 1 and row.ms > 0 for *_, rows in measured.stages for row in rows)
    assert measured.links is not None


def every_clip(model: str, seconds: float) -> tuple[Measured, list[Measured], list[str]]:
    clips = [clip(str(frames), frames) for frames in FRAMES]
    kept: list[Measured] = []
    said: list[str] = []
    with mock.patch("arachnec.profiling.in_turns.MOST_ROUNDS", 1):
        profiler = Profiler(load_model_file(model), clips, torch.device("cpu"), 2)
        return profiler.measure(Budget(seconds), said.append, kept.append), kept, said


def test_an_encoder_is_measured_at_every_size_of_the_data_where_the_budget_allows(model: Path) -> None:
    (measured, _, _), _ = run_ranks(2, every_clip, str(model), 1e6, timeout=600.0)
    rows = {stage: rows for stage, phase, rows in measured.stages if phase == "forward"}
    assert all(row.ms > 0 for row in rows["vae"])
    assert {row.sizes["frames"] for row in rows["vae"] if row.sizes} == set(FRAMES)
    assert {row.sizes is None for row in rows["dit"]} == {True}
    assert len({row.tokens for row in rows["dit"]}) == SHAPES


def precision(model: str, dtype: str) -> str:
    model_file = in_training_precision(load_model_file(model), Training(dtype=dtype))  # type: ignore[arg-type]
    profiler = Profiler(model_file, CLIPS[:1], torch.device("cpu"), 1)
    profiler.round()
    return profiler.measured().dtype


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "f32"), ("bf16", "bf16")])
def test_a_model_is_measured_in_the_precision_that_it_trains_in(model: Path, dtype: str, name: str) -> None:
    assert run_ranks(1, precision, str(model), dtype, timeout=600.0) == [name]


def test_a_budget_of_nothing_measures_every_stage_and_the_end_at_the_shortest_clip(model: Path) -> None:
    (measured, kept, said), _ = run_ranks(2, every_clip, str(model), 0.0, timeout=600.0)
    assert {row.tokens for *_, rows in measured.stages for row in rows} == {min(FRAMES) * 4}
    assert {stage for stage, *_ in measured.stages} >= {"vae", "dit", "dit/Block"}
    assert measured.synchronisation[0].step_ms > 0
    assert [line.split()[0] for line in said] == ["measuring"] * len(said)
    (first,) = kept  # what an interrupted run would write
    assert [key for *key, _ in first.stages] == [key for *key, _ in measured.stages]
    assert fit_profile(first.stages, machine="m", device="cpu", synchronisation=first.synchronisation).stages


def test_shapes_are_spread_from_the_shortest_to_the_longest_and_two_are_batched() -> None:
    clips = [clip(str(frames), frames) for frames in range(1, 40)]
    points = choose_points(clips, [10 * c.frames for c in clips])
    single = [point.tokens for point in points if len(point.clips) == 1]
    assert single[0] == 10
    assert single[-1] == 390
    assert single == sorted(set(single))
    assert [point.tokens for point in points if len(point.clips) > 1] == [10, single[len(single) // 2]]
