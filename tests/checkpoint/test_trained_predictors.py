"""Predictors in a checkpoint, or in a file of their own: by layer what a run measured, or one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from arachnec.checkpoint.files import write_file
from arachnec.checkpoint.folder import Position, file_of, step_folder, write_commit
from arachnec.checkpoint.parts import Part
from arachnec.checkpoint.trained_predictors import FILE, TrainedLayer, trained_predictors
from arachnec.ir.diagnostic import UserError

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
    assert trained_predictors(tmp_path).layers == {("blocks.0", 0): TrainedLayer((1.0, 1e-6), True)}
    assert trained_predictors(step_folder(tmp_path, 3)).layers["blocks.0", 0].densities == (0.5, 1e-6)


def test_a_file_of_its_own_is_read_by_its_folder_or_its_name(tmp_path: Path) -> None:
    folder = file_with(tmp_path / "run", **{"a.b.0": [0.1, 0.9, 0.0]})
    for place in (folder, folder / FILE):
        held = trained_predictors(place)
        assert held.layers == {("a.b", 0): TrainedLayer((0.9,), False)}
        assert held.features(("a.b", 0)) == 4 and held.features(("a.c", 0)) == 0
    with pytest.raises(UserError, match="has 4 elements, not 6"):
        held.projections(("a.b", 0), (1, 3, 2))


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
