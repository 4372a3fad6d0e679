"""Predictors in a checkpoint, or in a file of their own: by layer what a run measured, or one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arachnec.checkpoint.class_states import CLASSES, ClassState, class_tensor, classes_of
from arachnec.checkpoint.files import write_file
from arachnec.checkpoint.folder import Position, file_of, step_folder, write_commit
from arachnec.checkpoint.parts import Part
from arachnec.checkpoint.trained_predictors import FILE, TrainedLayer, trained_predictors, write_predictors
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import LENGTH_CLASSES, ByLength

NAME = "predictor/layer/blocks.0.0"


def file_with(path: Path, **rows: list[float]) -> Path:
    """A file of its own with these layers, and projections of four numbers."""
    path.mkdir(exist_ok=True)
    values = {f"predictor/layer/{name}": torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    values |= {f"predictor/{side}/{name}": torch.ones(4) for name in rows for side in ("query", "key")}
    write_file(path / FILE, {name: Part(value, 0, len(value)) for name, value in values.items()})
    return path


def test_the_newest_whole_checkpoint_counts_and_densities_are_shares(tmp_path: Path) -> None:
    for steps, density in ((3, 0.5), (9, 1.5), (12, 0.2)):
        path = step_folder(tmp_path, steps)
        path.mkdir()
        row = torch.tensor([0.5, 0.0, density, 0.0, 1.0], dtype=torch.float64)
        record = write_file(path / file_of(0), {NAME: Part(row, 0, 5)})
        write_commit(path, Position(steps, 0, "model"), [record])
    (path / file_of(0)).write_bytes(b"cut off")  # of step 12
    assert trained_predictors(tmp_path).layers == {("blocks.0", 0): TrainedLayer(ByLength((1.0, 1e-6)), True)}
    assert trained_predictors(step_folder(tmp_path, 3)).layers["blocks.0", 0].densities == ByLength((0.5, 1e-6))


def test_a_file_of_its_own_is_read_by_its_folder_or_its_name(tmp_path: Path) -> None:
    folder = file_with(tmp_path / "run", **{"a.b.0": [0.1, 0.9, 0.0]})
    for place in (folder, folder / FILE):
        held = trained_predictors(place)
        assert held.layers == {("a.b", 0): TrainedLayer(ByLength((0.9,)), False)}
        assert held.features(("a.b", 0)) == 4 and held.features(("a.c", 0)) == 0
    with pytest.raises(UserError, match="has 4 elements, not 6"):
        held.projections(("a.b", 0), (1, 3, 2))


KNOWN = {1024: ClassState((0.2,), (1.5,), (0.9,)), 16384: ClassState((0.6,), (0.25,), (0.4,))}


def classes_file(path: Path, table: torch.Tensor) -> Path:
    path.mkdir()
    values = {"predictor/layer/a.b.0": torch.tensor([0.1, 0.9, 1.0], dtype=torch.float64), f"{CLASSES}a.b.0": table}
    write_file(path / FILE, {name: Part(value, 0, len(value)) for name, value in values.items()})
    return path


def test_densities_of_classes_of_length_are_shares_too_and_an_export_keeps_them(tmp_path: Path) -> None:
    held = trained_predictors(classes_file(tmp_path / "run", class_tensor(KNOWN, 1)))
    expected = {("a.b", 0): TrainedLayer(ByLength((0.9,), ((1024, (1.0,)), (16384, (0.25,)))), True)}
    assert held.layers == expected
    (tmp_path / "export").mkdir()
    assert write_predictors(held.folder, held.stored, tmp_path / "export" / FILE)
    assert trained_predictors(tmp_path / "export").layers == expected


@given(st.dictionaries(st.sampled_from(LENGTH_CLASSES), st.lists(st.floats(0, 1), min_size=6, max_size=6)))
def test_states_by_class_come_back_from_their_tensor(rows: dict[int, list[float]]) -> None:
    states = {n: ClassState(*(tuple(row[at : at + 2]) for at in (0, 2, 4))) for n, row in sorted(rows.items())}
    assert classes_of(class_tensor(states, 2), 2) == states
    assert classes_of(torch.empty(0, dtype=torch.float64), 2) == {}


def test_a_state_of_a_class_that_is_not_finite_is_one_message(tmp_path: Path) -> None:
    table = class_tensor(KNOWN, 1)
    table[LENGTH_CLASSES.index(1024) * 3 + 1] = torch.inf
    with pytest.raises(UserError, match="is not finite in the class of 1024 tokens"):
        trained_predictors(classes_file(tmp_path / "run", table))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ({}, "its run had no sparse layers"),
        ({"blocks.0": [0.1, 0.9, 1.0, 0.0]}, "no layer's name and state"),
        ({"blocks": [0.1, 0.9, 1.0]}, "no layer's name and state"),
        ({"blocks.0.0": [0.1, float("nan"), 1.0]}, "is not finite"),
    ],
)
def test_what_is_no_predictor_is_one_message(tmp_path: Path, rows: dict[str, list[float]], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        trained_predictors(file_with(tmp_path / "run", **rows))


def test_a_place_without_predictors_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no whole checkpoint"):
        trained_predictors(tmp_path / "nowhere")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(UserError, match="text cannot be read"):
        trained_predictors(tmp_path / "text")
