"""Sparse attention in a run: predictors learn beside a model that trains as without them, and layers turn sparse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from arachnec.backends.torch_distributed.executor.iteration import Run
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans.supported import demand_supported
from arachnec.backends.torch_distributed.run.learned_sparsity import note_of_left
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.checkpoint.class_states import ClassState
from arachnec.checkpoint.trained_predictors import LAYER, QUERY
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import ByLength, LayerDensity, density_rows
from arachnec.ir.nodes import Module
from arachnec.ir.values import Formula, Quantity, Term, Value
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.predictor import Projections
from arachnec.model_state import sparse_predictors
from arachnec.model_state.key_list_files import Key, entries_that_differ, read_lists
from arachnec.model_state.measured_layers import HISTORY, STEPS_KEPT
from arachnec.model_state.sparse_predictors import SparsePredictors
from arachnec.models.file import load_model_file
from arachnec.sparsity.head_shares import FIRST
from arachnec.spmd.chosen_fetch import Room
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import Layer, LayerState
from tests.distributed.executor.runs.test_executor_ncclish import train_ncclish
from tests.distributed.executor_cases import MODEL, QUICK, Work, clip, losses, lowered, traced, train, train_on
from tests.distributed.harness import run_ranks
from tests.distributed.ncclish import Settings
from tests.distributed.rank_device import ON_GPU
from tests.slow import SLOW

CLIPS = (clip("long", 60), clip("short", 25), clip("dense", 2))
LAYERS = (("blocks.0", 1236), ("blocks.1", 1236))
SPARSE = (("sparse", (0, 1)),)
NONE = Quantity(0.0, "ms")
WORKS = (
    Work((0,), (0, 1), 0.0, attrs=SPARSE),
    Work((1,), (0,), 1.0, attrs=SPARSE),
    Work((2,), (1,), 1.0),
)
ON_THREE = (
    Work((0,), (2, 0, 1), 0.0, attrs=SPARSE),
    Work((1,), (1, 2), 1.0, attrs=SPARSE),
    Work((2,), (0,), 1.0),
)


def share_that_differs(one: Mapping[Key, KeyLists | None], other: Mapping[Key, KeyLists | None]) -> float:
    """Of the list entries of two runs, those that are not in both."""
    differing, total = entries_that_differ(one, other)
    return differing / max(1, total)


def planned(
    rank: int,
    works: tuple[Work, ...] = WORKS,
    world: int = 2,
    nodes: int = 1,
    clips: Sequence[VideoClip] = CLIPS,
    **more: Value,
) -> tuple[Module, Module]:
    """The traced module and the program. Keys are in many blocks, so that a small step of a density leaves one out.
    Predictors of rank 4, the size of a head, are right from the first step. Sparse kernels are so fast that they pay
    whatever a head needs, but for the clip of 8 tokens, which takes 0.00006 ms a layer."""
    source = traced(world, [clips])
    (stage,) = source.stages
    density = density_rows({layer: LayerDensity(0.5, (0.2,) * 3) for layer in range(2)})
    attrs = stage.attrs.updated(
        layers=LAYERS,
        density=density,
        predictor_rank=rank,
        query_group=16,
        key_block=1,
        mass=0.9,
        division="groups",
        sparse_speed=(1e3, 1e3, 1e3),
        choice_overhead=Quantity(0.001, "ms"),
    )
    source = replace(source, stages=(replace(stage, attrs=attrs.updated(**more)),))
    assert source.cluster is not None
    machines = source.cluster.attrs.updated(nodes=nodes, gpus=world // nodes)
    source = replace(source, cluster=replace(source.cluster, attrs=machines))
    program = lowered(source, works)
    squares = Formula((Term(1e-6, (("B", 1), ("S", 2))),), "ms")
    (stage,) = program.stages
    stages = (replace(stage, attrs=stage.attrs.updated(forward=squares, backward=squares)),)
    return source, replace(program, stages=stages)


def executable(
    folder: Path,
    rank: int | None,
    works: tuple[Work, ...] = WORKS,
    world: int = 2,
    pipeline: str = QUICK,
    nodes: int = 1,
    clips: Sequence[VideoClip] = CLIPS,
    **more: Value,
) -> Path:
    """Without a ``rank`` the same plan, dense."""
    source, program = planned(rank or 1, works, world, nodes, clips, **more)
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
        pipeline=pipeline,
        model_file=file,
        clips=clips,
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


def test_a_program_without_sparse_layers_says_what_it_leaves_of_a_checkpoint_with_them(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    trained(executable(tmp_path / "learning", 2), steps=1, checkpoint=kept)
    stored = {f"{part}blocks.{number}.0" for part in (LAYER, QUERY, "parameter/") for number in range(2)}
    told = "the checkpoint has predictors of 2 layers that this program keeps dense: the next ones are without them"
    assert note_of_left(stored, {name for name in stored if name.startswith("parameter/")}) == told
    assert note_of_left(stored, stored) is None
    assert trained(executable(tmp_path / "alone", None), more=1, checkpoint=kept, resume=True)["steps"][0]["step"] == 1


def test_layers_whose_predictors_are_right_turn_sparse_and_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    folder, alone = executable(tmp_path / "sparse", 4), executable(tmp_path / "alone", None)
    through = trained(folder, steps=9)
    dense = trained(alone, steps=2)
    losses = [step["loss"] for step in through["steps"]]
    assert losses[0] == dense["steps"][0]["loss"]
    assert losses[1] != dense["steps"][1]["loss"]
    assert losses[1] == pytest.approx(dense["steps"][1]["loss"], rel=1e-2)
    for layer in through["sparse_layers"]:
        assert layer["sparse"] and layer["loss"] < 0.01 and 0.97 <= layer["of_best"] <= 1 + 1e-6
        assert all(0 < density < 1 for density in layer["density"])
    trained(folder, steps=2, checkpoint=tmp_path / "kept")
    resumed = trained(folder, more=7, checkpoint=tmp_path / "kept", resume=True)
    assert [step["loss"] for step in resumed["steps"]] == losses[2:]
    first, second = (layer["history"] for layer in through["sparse_layers"])
    assert [a == b for a, b in pairwise(first)] == [True] * 7 + [False], "layer 0 learns in steps 0 and 8"
    assert [a == b for a, b in pairwise(second)] == [True] * 6 + [False, True], "and layer 1 in steps 0 and 7"
    for layer in (*resumed["sparse_layers"], *through["sparse_layers"]):
        assert layer["steps"] == list(range(9)) and len(layer["history"]) == 9
        assert layer["history"][-1] == pytest.approx(layer["sparsity"], abs=1e-4)
        assert layer["planned_density"] == [0.2] * 3 and layer["known_imbalance"] <= layer["imbalance"]
    assert resumed["sparse_layers"] == through["sparse_layers"]


def test_a_layer_runs_sparse_for_the_lengths_where_that_is_faster_by_what_was_measured(tmp_path: Path) -> None:
    """Keys were assumed to be few and are not: where nothing is saved, all losses are those of dense layers."""
    dense = trained(executable(tmp_path / "alone", None), steps=3)
    for name, speed, lengths in (("never", 1.0, []), ("long", 1.5, [240])):
        overhead = Quantity(0.006, "ms")  # dense, a clip of 240 tokens takes 0.058 ms a layer, one of 100 takes 0.010
        folder = executable(tmp_path / name, 4, sparse_speed=(speed, speed, 1.0), choice_overhead=overhead)
        report = trained(folder, steps=3)
        assert [layer["sparse_lengths"] for layer in report["sparse_layers"]] == [lengths] * 2
        assert all(layer["sparse"] for layer in report["sparse_layers"])
        same = [step["loss"] for step in report["steps"]] == [step["loss"] for step in dense["steps"]]
        assert same == (not lengths)


def test_behind_the_switch_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folder, wider = executable(tmp_path / "sparse", 4), executable(tmp_path / "wider", 4, ON_THREE, 3)
    trained(folder, steps=2, checkpoint=tmp_path / "kept")
    through = trained(folder, steps=3)
    resumed = train_on(3, wider, more=1, checkpoint=tmp_path / "kept", resume=True)
    assert resumed["steps"][0]["loss"] == pytest.approx(through["steps"][2]["loss"], rel=1e-5)
    for one, other in zip(through["sparse_layers"], resumed["sparse_layers"], strict=True):
        assert one["sparse"] and other["sparse"]
        assert other["sparsity"] == pytest.approx(one["sparsity"], abs=1e-4)


def test_given_the_same_lists_any_two_plans_have_the_same_losses(tmp_path: Path) -> None:
    """The other plan has a rank more, and divides heads otherwise. By itself it chooses what this one did."""
    folder, wider = executable(tmp_path / "sparse", 4), executable(tmp_path / "wider", 4, ON_THREE, 3)
    here = trained(folder, steps=3, save_lists=tmp_path / "here")
    there = train_on(3, wider, steps=3, save_lists=tmp_path / "there")
    replayed = {"replay_lists": tmp_path / "here", "save_lists": tmp_path / "again"}
    again = train_on(3, wider, steps=3, **replayed)
    assert [s["loss"] for s in again["steps"]] == pytest.approx([s["loss"] for s in here["steps"]], rel=1e-6)
    lists = {name: read_lists(tmp_path / name, 2) for name in ("here", "there", "again")}
    assert sum(known is not None for known in lists["here"].values()) == 4, "two clips of two layers"
    assert {clip for (clip, _), known in lists["here"].items() if known is None} == {"dense"}
    assert share_that_differs(lists["here"], lists["again"]) == 0
    assert share_that_differs(lists["here"], lists["there"]) <= 1e-3
    assert there["steps"][0]["loss"] == pytest.approx(here["steps"][0]["loss"], rel=1e-6)
    trained(folder, steps=3, save_lists=tmp_path / "there")  # as a job that goes on with fewer ranks
    assert share_that_differs(read_lists(tmp_path / "there", 2), lists["here"]) == 0
    next((tmp_path / "here" / "step-2").glob("rank-1.*")).unlink()
    with pytest.raises(UserError, match=r"cannot be replayed: head \d has no list for group"):
        read_lists(tmp_path / "here", 2)
    with pytest.raises(UserError, match="cannot be replayed: there are none"):
        read_lists(tmp_path / "here", 7)


ALIKE = tuple(clip(name, 60) for name in "abcd")
ASIDE = (*SPARSE, ("degree", 1), ("side", 2), ("ulysses", None), ("ring", None))
BATCHED = (Work((0, 1), (0, 1), 0.0, attrs=SPARSE), Work((2, 3), (0, 1), 1.0, attrs=ASIDE))
EACH = tuple(Work((n,), (n % 2,), n // 2, attrs=SPARSE) for n in range(4))


def test_a_plan_that_batches_clips_learns_and_chooses_what_one_that_does_not_does(tmp_path: Path) -> None:
    """Two clips in one batch on two ranks, two side by side, against each alone. What is drawn is the clip's own. (The
    predictors are right from the first step, so that their loss is what rounding makes of it.)"""
    works = {"batched": BATCHED, "each": EACH}
    folders = {name: executable(tmp_path / name, 4, of, clips=ALIKE) for name, of in works.items()}
    reports = [trained(folder, steps=4, save_lists=tmp_path / f"lists-{name}") for name, folder in folders.items()]
    one, other = ([step["loss"] for step in report["steps"]] for report in reports)
    assert one == pytest.approx(other, rel=1e-5)
    for mine, theirs in zip(*(report["sparse_layers"] for report in reports), strict=True):
        assert mine["sparse"] and theirs["sparse"]
        for measured in ("density", "sparsity", "mass", "of_best"):
            assert mine[measured] == pytest.approx(theirs[measured], rel=1e-3)
    lists = [read_lists(tmp_path / f"lists-{name}", 3) for name in works]
    assert len(lists[0]) == len(ALIKE) * len(LAYERS)
    assert share_that_differs(*lists) <= 1e-3


def test_what_a_step_measured_plans_the_step_after_the_next_and_changes_no_loss(tmp_path: Path) -> None:
    """Step 0 makes both layers sparse, so step 2 has a plan for their densities, which fall when they next learn, in
    steps 7 and 8. The planner's is faster than ours. It has every clip attend to lists, and so has ours: what is
    measured is of the same clips."""
    every = tuple(replace(work, attrs=SPARSE) for work in WORKS)
    following = executable(tmp_path / "following", 4, every, pipeline=f"sparsify,{QUICK}", choice_overhead=NONE)
    kept = executable(tmp_path / "kept", 4, every, choice_overhead=NONE)
    reports = [trained(folder, steps=9) for folder in (following, kept)]
    losses = [[step["loss"] for step in report["steps"]] for report in reports]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for layer, kept in zip(*(report["sparse_layers"] for report in reports), strict=True):
        assert layer["sparse"] and kept["planned_density"] == [0.2] * 3
        for planned, before, now in zip(
            layer["planned_density"], kept["planned_density"], layer["density"], strict=True
        ):
            assert planned != before and now < planned <= 1, "densities begin at 1 and fall"


IN_A_CELL = tuple(replace(work, ranks=(0, 1), start=float(at)) for at, work in enumerate(WORKS))


def test_in_a_cell_of_ranks_layers_turn_sparse_as_where_the_model_is_whole(tmp_path: Path) -> None:
    """Parameters of a layer come and go; its predictors stay, on every rank."""
    cells = executable(tmp_path / "cells", 4, IN_A_CELL, cell=2, params=2614)
    reports = [trained(folder, steps=3) for folder in (cells, executable(tmp_path / "whole", 4, IN_A_CELL))]
    one, other = ([step["loss"] for step in report["steps"]] for report in reports)
    assert one == pytest.approx(other, rel=1e-6)
    assert all(layer["sparse"] for report in reports for layer in report["sparse_layers"])


def train_counting_repeats(folder: Path, options: RunOptions, margin: float) -> int:
    """Chosen keys have ``margin`` times the room that they should need. How many steps were done again."""
    again, repeats = Trainer._again, []

    def counted(self: Trainer, *arguments: Any) -> Run:
        repeats.append(1)
        return again(self, *arguments)

    with (
        mock.patch.object(sparse_predictors, "Room", partial(Room, margin=margin)),
        mock.patch.object(Trainer, "_again", counted),
    ):
        train(folder, options)
    return len(repeats)


@SLOW
def test_between_machines_chosen_keys_change_no_loss_and_without_room_a_step_is_done_again(tmp_path: Path) -> None:
    """Step 0 measures and makes the layers sparse, those up to 6 get only the keys that they chose. In step 7 layer 1
    learns, with all keys, and layer 0 does not."""
    apart, here = executable(tmp_path / "apart", 4, nodes=2), executable(tmp_path / "here", 4)
    saved = {margin: tmp_path / f"lists-{margin}" for margin in (2.0, 0.0)}
    runs = {}
    for margin, lists in saved.items():
        repeats = run_ranks(2, train_counting_repeats, apart, RunOptions(steps=8, save_lists=lists), margin)
        assert repeats == ([7, 7] if margin == 0 else [0, 0])
        runs[margin] = losses(apart / "run.json")
    assert runs[0.0] == pytest.approx(runs[2.0], rel=1e-6)
    again = trained(here, steps=8, replay_lists=saved[2.0])
    assert [step["loss"] for step in again["steps"]] == pytest.approx(runs[2.0], rel=1e-6)
    for told in (json.loads((apart / "run.json").read_text()), again):
        assert [a == b for a, b in pairwise(told["sparse_layers"][1]["history"])] == [True] * 6 + [False]


@SLOW
@pytest.mark.skipif(ON_GPU, reason="gloo and the emulator of NCCL run on the processor")
def test_over_nccl_s_semantics_a_run_turns_sparse_as_over_gloo(tmp_path: Path) -> None:
    """No sum of the predictors meets one of the model's out of order, and none connects a group in use."""
    here, gloo = executable(tmp_path / "here", 4), executable(tmp_path / "gloo", 4)
    settings = Settings(delay=1e-3, kernels=1)
    for counts in run_ranks(2, train_ncclish, here, RunOptions(steps=3), settings):
        assert not counts.freed_in_flight and not counts.written_in_flight and counts.connected_in_use == 0
    trained(gloo, steps=3)
    assert losses(here / "run.json") == pytest.approx(losses(gloo / "run.json"), rel=1e-6)


def test_what_cannot_run_is_refused_at_load_with_what_to_do_instead() -> None:
    _, program = planned(4)
    demand_supported(program, program.programs)
    (stage,) = program.stages
    for said, attrs in {
        "in host memory": {"host": ("optimizer",)},
        "no one graph serves": {"graphs": "shapes"},
    }.items():
        module = replace(program, stages=(replace(stage, attrs=stage.attrs.updated(**attrs)),))
        with pytest.raises(UserError, match=said) as error:
            demand_supported(module, module.programs)
        assert len(error.value.diagnostics) == 1


def test_a_checkpoint_keeps_the_history_and_the_spread_and_one_without_them_is_taken() -> None:
    """Of more steps than are kept those that are left, which go on as before."""
    _, program = planned(2)
    before, after = (SparsePredictors.of(program, Known(), 0) for _ in range(2))
    for step in range(STEPS_KEPT + 3):
        classes = ((64, (0.5, step / 512, 0.25)),) if step > 2 else ()
        before.history.add(step, dict.fromkeys(before.layers, ByLength((step / 512, 0.0, 0.5), classes)))
    before.spread = dict.fromkeys(before.layers, (0.25, 0.5, 1.0))
    own = ClassState((0.1, 0.2, 0.3), (0.9, 0.8, 0.7), (1.0, 0.5, 0.25))
    before.classes = {0: {64: own, 4096: own}, 1: {}}
    tensors = before.tensors()
    after.loaded(tensors, "kept")
    known = before.history, before.spread, before.classes
    assert (after.history, after.spread, after.classes) == known and after.history.every == 2
    older = SparsePredictors.of(program, Known(), 0)
    older.loaded({name: value for name, value in tensors.items() if not name.startswith(HISTORY)}, "kept")
    assert older.history.steps == [] and older.spread == older.classes == {}
    without = SparsePredictors.of(program, Known(), 0)
    without.loaded({name: value for name, value in tensors.items() if "class" not in name}, "kept")
    assert without.history.steps == before.history.steps and without.classes == {}
    assert not any(row[0].classes for row in without.history.rows)


class Known:
    """Stands in for a model: both layers can be sparse."""

    def sparsify(self, rank: int, seed: int, here: Set[str] | None = None) -> dict[Layer, LayerState]:
        assert seed == 0
        return {(path, 0): self.state(rank) for path, _ in LAYERS}

    def state(self, rank: int) -> LayerState:
        values = Projections(torch.ones(3, 4, rank), torch.ones(3, 4, rank))
        return LayerState(Site(0, 3, 4, None), values, (0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize("node", [0, 1])
def test_which_layers_learn_follows_from_the_step_and_their_state_on_every_cluster(node: int) -> None:
    _, program = planned(2)
    predictors = SparsePredictors.of(program, Known(), 0)
    predictors.node = node
    clips = dict(enumerate(CLIPS))

    def resting(step: int) -> set[int]:
        predictors.collect(step)  # forgets the cascades
        cascade = predictors.cascade(program.cascades[0], clips, 0, step, 1.0)
        assert cascade is not None and set(cascade.room) == (set(cascade.resting) if node else set())
        assert predictors.fetches(step) == bool(cascade.room)
        return {number for number, (path, _) in enumerate(LAYERS) if (path, 0) in cascade.resting}

    assert resting(0) == resting(1) == resting(FIRST - 1) == set()
    predictors.layers[1] = replace(predictors.layers[1], sparse=True)
    assert [resting(step) for step in range(5, 10)] == [{1}, {1}, set(), {1}, {1}]
    assert [resting(step) for step in (FIRST, FIRST + 7, FIRST + 15)] == [{1}, {0}, {0}]


def test_scores_that_are_not_finite_are_one_message_and_change_nothing() -> None:
    _, program = planned(2)
    predictors = SparsePredictors.of(program, Known(), 0)
    before = {name: value.clone() for name, value in predictors.tensors().items()}
    sums, gradients = torch.ones(21, 8, 3), [torch.ones(3, 4, 2)] * 2
    broken = [gradients[0] * float("nan"), gradients[1]]
    with pytest.raises(UserError, match="scores of layer 1 are not finite in step 7"):
        predictors._learn({0: (sums, gradients), 1: (sums, broken)}, 7)
    assert all(torch.equal(value, before[name]) for name, value in predictors.tensors().items())
