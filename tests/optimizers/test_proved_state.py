"""What a plan proves is what the options keep: their precision, their optimizer, their averages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arachnec.driver import compile as compile_model
from arachnec.executable.training_options import Schedule, TorchClass, Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import quantity
from tests.commands.small_model import MODEL

PARAMETERS = 2 * (8 * 24 + 24)
GIB = 2**30
ONE_CYCLE = Schedule(scheduler=TorchClass("OneCycleLR", {"max_lr": 0.1, "total_steps": 100}))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.py").write_text(MODEL)
    rows = ({"frames": frames, "height": 32, "width": 48, "text_tokens": 8} for frames in (9, 5))
    (folder / "clips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "model.py", folder / "clips.jsonl"


@pytest.mark.parametrize(
    ("training", "optimizer", "state"),
    [
        (Training(), 8, 16),
        (Training(ema=0.9), 12, 20),
        (Training(optimizer=TorchClass("SGD")), 0, 8),
        (Training(optimizer=TorchClass("SGD", {"momentum": 0.9})), 4, 12),
        (Training(optimizer=TorchClass("SGD"), schedule=ONE_CYCLE), 4, 12),  # it sets momentum
        (Training(dtype="bf16"), 12, 18),  # moments, masters; gradients in fp32 are those that are updated from
    ],
    ids=["adamw", "ema", "sgd", "momentum", "one-cycle", "bf16"],
)
def test_bytes_per_parameter(files: tuple[Path, Path], training: Training, optimizer: int, state: int) -> None:
    stage = compile_model(*files, "2:cpu", training=training).module.stages[-1]
    assert quantity(stage.attrs["optimizer"]) * GIB == pytest.approx(optimizer * PARAMETERS, rel=0.02, abs=1)
    assert quantity(stage.attrs["state"]) * GIB == pytest.approx(state * PARAMETERS, rel=0.02)


def test_what_updates_whole_tensors_keeps_rows_and_columns_and_is_refused_in_cells(files: tuple[Path, Path]) -> None:
    training = Training(optimizer=TorchClass("Adafactor"))
    stage = compile_model(*files, "2:cpu", training=training).module.stages[-1]
    assert "optimizer" not in stage.attrs
    kept = 2 * (4 * (8 + 24) + 4 * 24 + 2 * 4)  # factors of a weight, the moment of a bias, two steps
    assert quantity(stage.attrs["state"]) * GIB == pytest.approx(8 * PARAMETERS + kept)
    with pytest.raises(UserError, match="Adafactor updates whole tensors, and of @dit parameters are dealt out"):
        compile_model(*files, "2:cpu", passes="fsdp", training=training)
