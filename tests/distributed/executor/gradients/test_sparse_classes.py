"""Densities by class of length in a run: a clip keeps the keys that its class needs, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from arachnec.checkpoint.class_states import CLASSES, VALUES, ClassState
from arachnec.checkpoint.files import RUNS, write_file
from arachnec.checkpoint.folder import committed, read_commit, write_commit
from arachnec.checkpoint.parts import Part
from arachnec.ir.head_density import LENGTH_CLASSES, ByLength
from arachnec.kernels.sparse.predictor import kept_blocks
from arachnec.model_state.key_list_files import read_lists
from arachnec.model_state.measured_layers import HISTORY
from arachnec.model_state.sparse_predictors import SparsePredictors
from tests.distributed.executor.gradients.test_sparse import (
    CLIPS,
    LAYERS,
    NONE,
    ON_THREE,
    WORKS,
    Known,
    executable,
    planned,
    trained,
)
from tests.distributed.executor_cases import QUICK, run, train_on

TOKENS = {"long": 240, "short": 100}
CLASS = {"long": 128, "short": 64}


def by_class(layer: dict[str, Any], name: str = "density") -> dict[int, list[float]]:
    return {own["tokens"]: own[name] for own in layer["classes"]}


def test_a_clip_keeps_the_blocks_of_its_own_class_whose_densities_are_in_the_report(tmp_path: Path) -> None:
    folder = executable(tmp_path / "sparse", 4)
    before = trained(folder, steps=4)["sparse_layers"]
    after = trained(folder, steps=5, save_lists=tmp_path / "lists")["sparse_layers"]
    lists = read_lists(tmp_path / "lists", 4)
    for number, (path, _) in enumerate(LAYERS):
        assert list(by_class(before[number])) == [64, 128], "the dense clip of 8 tokens measures nothing"
        for clip, tokens in TOKENS.items():
            kept = lists[clip, f"{path}.0"]
            assert kept is not None
            of_head = kept.counts[0].unique(dim=1)  # every group of a head keeps as many blocks
            assert of_head[:, 0].tolist() == kept_blocks(by_class(before[number])[CLASS[clip]], tokens)
        assert by_class(before[number])[64] != by_class(before[number])[128] != before[number]["density"]
        assert by_class(after[number], "planned_density") == {64: [0.2] * 3, 128: [0.2] * 3}
        for own in after[number]["classes"]:
            assert len(own["history"]) == 5 and own["history"][-1] == pytest.approx(own["sparsity"], abs=1e-4)


def test_what_is_known_of_a_class_does_not_depend_on_the_plan(tmp_path: Path) -> None:
    """Two ranks and three, which divide heads otherwise; one all-reduce, so every rank's lists are of the same."""
    here = trained(executable(tmp_path / "two", 4), steps=5)["sparse_layers"]
    there = train_on(3, executable(tmp_path / "three", 4, ON_THREE, 3), steps=5)["sparse_layers"]
    for one, other in zip(here, there, strict=True):
        for name in ("density", "sparsity"):
            mine, theirs = by_class(one, name), by_class(other, name)
            assert mine.keys() == theirs.keys()
            for length, values in mine.items():
                assert theirs[length] == pytest.approx(values, rel=1e-3)


def test_plans_follow_what_was_measured_of_a_class(tmp_path: Path) -> None:
    every = tuple(replace(work, attrs=(("sparse", (0, 1)),)) for work in WORKS)
    following = executable(tmp_path / "following", 4, every, pipeline="sparsify," + QUICK, choice_overhead=NONE)
    report = trained(following, steps=5)
    for layer in report["sparse_layers"]:
        planned = by_class(layer, "planned_density")
        assert planned.keys() >= {64, 128} and len({tuple(own) for own in planned.values()}) > 1
        for length, now in by_class(layer).items():
            assert all(0 < one <= before <= 1 for one, before in zip(now, planned[length], strict=True))


def test_a_checkpoint_of_one_density_a_head_is_gone_on_from(tmp_path: Path) -> None:
    """Every class begins with what was known of all lengths, and has its own after the next measurement."""
    folder = executable(tmp_path / "sparse", 4)
    first = trained(folder, steps=1, checkpoint=tmp_path / "kept")["sparse_layers"]
    rewrite(tmp_path / "kept", without_classes)
    resumed = trained(folder, more=1, checkpoint=tmp_path / "kept", resume=True, save_lists=tmp_path / "lists")
    lists = read_lists(tmp_path / "lists", 1)
    for number, (path, _) in enumerate(LAYERS):
        assert resumed["sparse_layers"][number]["classes"] == [], "a layer that is sparse rests in step 1"
        for clip, tokens in TOKENS.items():
            kept = lists[clip, f"{path}.0"]
            assert kept is not None
            assert kept.counts[0, :, 0].tolist() == kept_blocks(first[number]["density"], tokens)
    later = trained(folder, more=7, checkpoint=tmp_path / "kept", resume=True)["sparse_layers"]
    assert all(list(by_class(layer)) == [64, 128] for layer in later)


def without_classes(parts: dict[str, Part]) -> dict[str, Part]:
    """As a version wrote them that had no classes of length."""
    return {name: part for name, part in parts.items() if not name.startswith((CLASSES, f"{HISTORY}by-class/"))}


def rewrite(kept: Path, change: Callable[[dict[str, Part]], dict[str, Part]]) -> Path:
    """Give the newest checkpoint other tensors, with records that say so; its folder."""
    place = next(iter(committed(kept)))
    commit = read_commit(place)
    assert commit is not None
    records = []
    for record in commit.files:
        with safe_open(place / record.name, "pt") as opened:
            runs = msgspec.json.decode((opened.metadata() or {})[RUNS], type=dict[str, tuple[int, int]])
            parts = change({name: Part(opened.get_tensor(name), *run) for name, run in runs.items()})
        (place / record.name).unlink()
        records.append(write_file(place / record.name, parts))
    write_commit(place, commit.position, records)
    return place


def test_a_damaged_state_of_a_class_is_one_message_of_the_resumed_run(tmp_path: Path) -> None:
    folder, kept = executable(tmp_path / "sparse", 4), tmp_path / "kept"
    trained(folder, steps=1, checkpoint=kept)

    def damage(parts: dict[str, Part]) -> dict[str, Part]:
        for name, part in parts.items():
            if name.startswith(CLASSES):
                part.values[LENGTH_CLASSES.index(64) * VALUES * 3] = torch.nan
        return parts

    place = rewrite(kept, damage)
    refused = run(folder, "--steps", "1", "--checkpoint", kept, "--resume")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    told = " ".join(refused.stderr.split())
    assert f"the state of sparse layer `{LAYERS[0][0]}.0` is not finite in the class of 64 tokens" in told
    assert str(place) in told and "delete this folder" in told


def test_the_room_of_chosen_keys_and_what_plans_follow_are_those_of_the_class() -> None:
    _, program = planned(4, nodes=2)
    predictors = SparsePredictors.of(program, Known(), 0)
    predictors.node = 1
    predictors.layers = {n: replace(state, sparse=True) for n, state in predictors.layers.items()}
    own = ClassState((0.9,) * 3, (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
    predictors.classes = {0: {128: own}}
    cascades = [predictors.cascade(cascade, dict(enumerate(CLIPS)), 0, 1, 1.0) for cascade in program.cascades[:2]]
    long, short = (cascade for cascade in cascades if cascade is not None)
    name = LAYERS[0][0], 0
    assert (long.layers[name].densities, long.room[name].spread) == (own.densities, own.spread)
    assert (short.layers[name].densities, short.room[name].spread) == ((1.0,) * 3, (1.0,) * 3)
    assert predictors.running == {0: ByLength((1.0,) * 3, ((128, own.densities),)), 1: ByLength((1.0,) * 3)}
