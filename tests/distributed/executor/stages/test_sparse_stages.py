"""Stages of a cut model whose layers attend to chosen keys: the run of the model that is whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans.kept_plan import with_densities
from arachnec.driver import plan_iteration, plan_model
from arachnec.executable.folder import read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.head_density import ByLength, LayerDensity, density_rows, measured_densities, sparse_stages
from arachnec.ir.nodes import Module
from arachnec.kernels.sparse.predictor import Projections
from arachnec.model_state import sparse_predictors
from arachnec.model_state.key_list_files import entries_that_differ, read_lists
from arachnec.model_state.sparse_predictors import SparsePredictors
from arachnec.models.file import load_model_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.sparsity.head_shares import learns
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import Layer, LayerState
from tests.distributed.executor_cases import FOUR_BLOCKS, QUICK, clip, train
from tests.distributed.harness import run_ranks
from tests.distributed.pipeline_cases import figures, pipeline_of, traced
from tests.slow import slow

CLIPS = (clip("long", 60), clip("short", 25), clip("third", 40))
LAYERS = 4
WHOLE = QUICK.replace("choose-layout,offload", "shard-optimizer")


def source(world: int) -> Module:
    """Densities of four layers; predictors of rank 4, the size of a head, are right from the first step. Sparse kernels
    are so fast that they pay whatever a head needs."""
    assert f"range({LAYERS})" in FOUR_BLOCKS
    module = traced(world, [CLIPS])
    (stage,) = module.stages
    density = density_rows({layer: LayerDensity(0.25, (0.2,) * 3) for layer in range(LAYERS)})
    attrs = stage.attrs.updated(
        **dict(figures({"Block": tuple(f"blocks.{n}" for n in range(LAYERS))}).items()),
        density=density, predictor_rank=4, query_group=16, key_block=1, mass=0.9, division="groups",
        tied_layers=None, dtype="f32", sparse_speed=(1e3, 1e3, 1e3),
    )  # fmt: skip
    return replace(module, stages=(replace(stage, attrs=attrs),))


def executable(folder: Path, world: int, passes: str, before: str = "") -> Path:
    """``before`` are passes of the whole model that the module has behind it."""
    module, pipeline = source(world), Pipeline.parse(passes)
    model, _ = plan_model(module, pipeline)
    folder.mkdir()
    place = folder / "source.py"
    place.write_text(FOUR_BLOCKS)
    return write_executable(
        folder,
        program=plan_iteration(model, pipeline, 0)[0],
        traced=module,
        model=model,
        pipeline=before + passes,
        model_file=load_model_file(place),
        clips=CLIPS,
        training=Training(clip_norm=0.5),
    )


def train_on(ranks: int, folder: Path, **options: object) -> dict[str, Any]:
    """The report of ranks whose sparse layers learn in every fourth step: of four layers two in three steps."""
    run_ranks(ranks, train_in_turns, folder, RunOptions(**options))  # type: ignore[arg-type]
    report: dict[str, Any] = msgspec.json.decode((folder / "run.json").read_bytes())
    return report


def train_in_turns(folder: Path, options: RunOptions) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_predictors, "learns", partial(learns, sparse_every=LAYERS))
        train(folder, options)


def losses(report: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in report["steps"]]


def assert_same_gradients(saved: Path, expected: Path) -> None:
    gradients, others = load_file(saved), load_file(expected)
    assert gradients.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Three steps of the model that is whole, on one rank: its folder, with lists and gradients beside it, and what it
    reports. Step 0 is dense and makes all layers sparse."""
    folder = executable(tmp_path_factory.mktemp("whole") / "build", 1, WHOLE)
    beside = {"save_lists": folder.parent / "lists", "save_gradients": folder.parent / "gradients.safetensors"}
    report = train_on(1, folder, steps=3, **beside)
    assert len(report["sparse_layers"]) == LAYERS and all(layer["sparse"] for layer in report["sparse_layers"])
    return folder, report


@pytest.mark.parametrize(
    ("world", "stages", "schedule"),
    [
        slow(2, "p=2", "schedule=1f1b"),
        slow(2, "p=4", "schedule=zb-v"),
        slow(4, "cuts=[1]", "schedule=1f1b,degree=1"),
        (4, "p=2", "schedule=zb-h1,degree=2,recompute=true"),
    ],
)
def test_with_the_same_lists_stages_have_the_losses_and_gradients_of_the_whole_model(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]], world: int, stages: str, schedule: str
) -> None:
    folder, expected = whole
    staged = executable(tmp_path / "staged", world, pipeline_of(stages, schedule))
    given = {"replay_lists": folder.parent / "lists", "save_lists": tmp_path / "again"}
    report = train_on(world, staged, steps=3, save_gradients=tmp_path / "staged.safetensors", **given)
    assert losses(report) == pytest.approx(losses(expected), rel=1e-5)
    assert_same_gradients(tmp_path / "staged.safetensors", folder.parent / "gradients.safetensors")
    lists = [read_lists(place, 2) for place in (folder.parent / "lists", tmp_path / "again")]
    assert len(lists[0]) == LAYERS * len(CLIPS)
    assert entries_that_differ(*lists)[0] == 0


def test_by_themselves_stages_choose_and_learn_what_the_whole_model_does(
    tmp_path: Path, whole: tuple[Path, dict[str, Any]]
) -> None:
    folder, expected = whole
    staged = executable(tmp_path / "staged", 4, pipeline_of("p=2", "schedule=1f1b,degree=2"))
    alone = train_on(4, staged, steps=3, save_lists=tmp_path / "alone")
    assert losses(alone) == pytest.approx(losses(expected), rel=1e-4)
    lists = [read_lists(place, 2) for place in (folder.parent / "lists", tmp_path / "alone")]
    differing, total = entries_that_differ(*lists)
    assert differing <= 1e-3 * total
    for one, other in zip(expected["sparse_layers"], alone["sparse_layers"], strict=True):
        assert (one["layer"], one["path"], one["sparse"]) == (other["layer"], other["path"], other["sparse"])
        assert other["density"] == pytest.approx(one["density"], abs=0.02)
        assert [own["tokens"] for own in other["classes"]] == [own["tokens"] for own in one["classes"]] == [64, 128]
        for mine, theirs in zip(one["classes"], other["classes"], strict=True):
            assert theirs["density"] == pytest.approx(mine["density"], abs=0.02)
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2, abs=1e-6)


def test_a_run_goes_on_in_stages_and_back_on_one_rank(tmp_path: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    """Killed as the layers have turned sparse and once more, with the moments of the predictors; the same lists."""
    folder, expected = whole
    staged = executable(tmp_path / "staged", 2, pipeline_of("p=2", "schedule=1f1b"))
    given = {"replay_lists": folder.parent / "lists", "checkpoint": tmp_path / "kept"}
    steps = losses(train_on(1, folder, steps=1, **given))
    steps += losses(train_on(2, staged, more=1, resume=True, **given))
    last = train_on(1, folder, more=1, resume=True, **given)
    assert [*steps, *losses(last)] == pytest.approx(losses(expected), rel=1e-5)
    for one, other in zip(expected["sparse_layers"], last["sparse_layers"], strict=True):
        assert one["sparse"] and other["sparse"]
        assert other["sparsity"] == pytest.approx(one["sparsity"], abs=1e-4)
        assert (other["loss"] is None) == (one["layer"] != 2), "in step 2 the third of four sparse layers learns"


def test_plans_of_stages_follow_what_a_run_measures(tmp_path: Path, whole: tuple[Path, dict[str, Any]]) -> None:
    """Each stage's plan has its own layers' densities, by their numbers in the model; no loss depends on the plan."""
    folder, expected = whole
    staged = executable(tmp_path / "staged", 2, pipeline_of("cuts=[1]", "schedule=1f1b"), "sparsify,")
    known = {0: ByLength((0.5,) * 3, ((64, (0.75,) * 3),)), 2: ByLength((0.25,) * 3)}
    told = with_densities(read_executable(staged).program, known)
    measured = [{n: layer.by_length for n, layer in (measured_densities(s) or {}).items()} for s in told.stages]
    assert measured == [{0: known[0]}, {1: known[2]}]
    report = train_on(2, staged, steps=3, replay_lists=folder.parent / "lists")
    assert losses(report) == pytest.approx(losses(expected), rel=1e-5)


class Known:
    """Stands in for a model: all layers can be sparse."""

    def sparsify(self, rank: int, seed: int, here: Any = None) -> dict[Layer, LayerState]:
        states = {}
        for number in range(LAYERS):
            path = f"blocks.{number}"
            own = torch.ones(3, 4, rank) if here is None or path in here else torch.empty(0)
            states[path, 0] = LayerState(Site(0, 3, 4, None), Projections(own, own.clone()), (0.0,) * 3, (1.0,) * 3)
        return states


def test_a_rank_has_the_predictors_of_its_stages_and_one_rank_of_a_stage_writes_them(tmp_path: Path) -> None:
    folder = executable(tmp_path / "staged", 4, pipeline_of("cuts=[1]", "schedule=1f1b,degree=1"))
    program = read_executable(folder).program
    assert list(sparse_stages(program)) == [0, 1]
    written = []
    for rank in range(4):
        tensors = SparsePredictors.of(program, Known(), 0, rank).tensors()
        here = {name for name in tensors if name.startswith("predictor/query/")}
        assert here == {f"predictor/query/blocks.{n}.0" for n in ((0,) if rank < 2 else (1, 2, 3))}
        assert sum(name.startswith("predictor/layer/") for name in tensors) == LAYERS
        written += [name for name, part in tensors.items() if getattr(part, "writes", False)]
    assert len(written) == len(set(written)) == LAYERS * 2 * 4, "two projections, their moments and step counts"
