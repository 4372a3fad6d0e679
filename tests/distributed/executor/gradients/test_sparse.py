"""Sparse attention in a run: predictors learn beside a model that trains as without them, and layers turn sparse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arachnec.backends.torch_distributed.supported import SparseCannotRun, demand_supported
from arachnec.executable.folder import write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import LayerDensity, density_rows
from arachnec.ir.nodes import Module
from arachnec.kernels.sparse.predictor import Projections
from arachnec.model_state.sparse_predictors import SparsePredictors, heads_note
from arachnec.models.file import load_model_file
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import Layer, LayerState
from tests.distributed.executor_cases import MODEL, QUICK, Work, clip, lowered, traced, train_on

CLIPS = (clip("long", 60), clip("short", 25), clip("dense", 2))
LAYERS = (("blocks.0", 1236), ("blocks.1", 1236))
SPARSE = (("sparse", (0, 1)),)
WORKS = (
    Work((0,), (0, 1), 0.0, attrs=SPARSE),
    Work((1,), (0,), 1.0, attrs=SPARSE),
    Work((2,), (1,), 1.0),
)


def planned(rank: int, works: tuple[Work, ...] = WORKS) -> tuple[Module, Module]:
    """The traced module and the program. Keys are in many blocks, so that a small step of a density leaves one out.
    Predictors of rank 4, the size of a head, are right from the first step."""
    source = traced(2, [CLIPS])
    (stage,) = source.stages
    density = density_rows({layer: LayerDensity(0.5, (0.2,) * 3) for layer in range(2)})
    attrs = stage.attrs.updated(
        layers=LAYERS, density=density, predictor_rank=rank, query_group=16, key_block=1, mass=0.9, division="groups"
    )
    source = replace(source, stages=(replace(stage, attrs=attrs),))
    return source, lowered(source, works)


def executable(folder: Path, rank: int | None) -> Path:
    """Without a ``rank`` the same plan, dense."""
    source, program = planned(rank or 1)
    if rank is None:
        source = traced(2, [CLIPS])
        program = lowered(source, [replace(work, attrs=()) for work in WORKS])
    folder.mkdir()
    place = folder / "source.py"
    place.write_text(MODEL)
    file = load_model_file(place)
    write_executable(
        folder,
        program=program,
        traced=source,
        pipeline=QUICK,
        model_file=file,
        clips=CLIPS,
        training=Training(clip_norm=0.5),
    )
    return folder


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    return train_on(2, folder, **options)


def test_beside_dense_layers_predictors_learn_and_no_bit_of_the_model_s_training_changes(tmp_path: Path) -> None:
    learning, alone = executable(tmp_path / "learning", 2), executable(tmp_path / "alone", None)
    files = [tmp_path / "learning.safetensors", tmp_path / "alone.safetensors"]
    reports = [
        trained(folder, steps=2, save_gradients=file) for folder, file in zip((learning, alone), files, strict=True)
    ]
    for name in ("loss", "gradient_norm"):
        assert [step[name] for step in reports[0]["steps"]] == [step[name] for step in reports[1]["steps"]]
    gradients, expected = map(load_file, files)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())
    assert not any(layer["sparse"] for layer in reports[0]["sparse_layers"])
    assert reports[1]["sparse_layers"] == []


def test_layers_whose_predictors_are_right_turn_sparse_and_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    folder, alone = executable(tmp_path / "sparse", 4), executable(tmp_path / "alone", None)
    through = trained(folder, steps=3)
    dense = trained(alone, steps=3)
    losses = [step["loss"] for step in through["steps"]]
    assert losses[0] == dense["steps"][0]["loss"]
    assert losses[1] != dense["steps"][1]["loss"]
    assert losses[1] == pytest.approx(dense["steps"][1]["loss"], rel=1e-2)
    for layer in through["sparse_layers"]:
        assert layer["sparse"] and layer["loss"] < 0.01 and 0.97 <= layer["of_best"] <= 1
        assert all(0 < density < 1 for density in layer["density"])
    trained(folder, steps=2, checkpoint=tmp_path / "kept")
    resumed = trained(folder, steps=1, checkpoint=tmp_path / "kept", resume=True)
    assert [step["loss"] for step in resumed["steps"]] == losses[2:]
    assert resumed["sparse_layers"] == through["sparse_layers"]


def test_what_cannot_run_is_refused_at_load_with_what_to_do_instead() -> None:
    _, program = planned(4)
    demand_supported(program, program.programs)
    (stage,) = program.stages
    around = [Work((0,), (0, 1), 0.0, attrs=(*SPARSE, ("ulysses", 1), ("ring", 2))), *WORKS[1:]]
    cases = [(planned(4, tuple(around))[1], "in a ring")]
    for said, attrs in {"over cells": {"cell": 2}, "in host memory": {"host": ("optimizer",)}}.items():
        cases.append((replace(program, stages=(replace(stage, attrs=stage.attrs.updated(**attrs)),)), said))
    for module, said in cases:
        with pytest.raises(UserError, match=said) as error:
            demand_supported(module, module.programs)
        assert [type(problem) for problem in error.value.diagnostics] == [SparseCannotRun]


class Known:
    """Stands in for a model: both layers can be sparse."""

    def sparsify(self, rank: int, seed: int) -> dict[Layer, LayerState]:
        assert seed == 0
        return {(path, 0): self.state(rank) for path, _ in LAYERS}

    def state(self, rank: int) -> LayerState:
        values = Projections(torch.ones(3, 4, rank), torch.ones(3, 4, rank))
        return LayerState(Site(0, 3, 4, None), values, (0.0,) * 3, (1.0,) * 3)


def test_scores_that_are_not_finite_are_one_message_and_change_nothing() -> None:
    _, program = planned(2)
    predictors = SparsePredictors.of(program.stages[0], Known(), 0)
    before = {name: value.clone() for name, value in predictors.tensors().items()}
    sums, gradients = torch.ones(6, 3), [torch.ones(3, 4, 2)] * 2
    broken = [gradients[0] * float("nan"), gradients[1]]
    with pytest.raises(UserError, match="scores of layer 1 are not finite in step 7"):
        predictors._learn({0: (sums, gradients), 1: (sums, broken)}, 7)
    assert all(torch.equal(value, before[name]) for name, value in predictors.tensors().items())


def test_a_person_is_told_where_the_plan_divides_heads_as_no_rank_does() -> None:
    assert "by number, not by density" in (heads_note(planned(4)[1]) or "")  # 3 heads on 2 ranks: one is cut
    assert heads_note(planned(4, WORKS[1:])[1]) is None
