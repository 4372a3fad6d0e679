"""A manifest too long to list is compiled by its first batch and its shapes, and rank 0 draws from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arachnec.data import parquet_clips
from arachnec.data.manifest import read_manifest
from arachnec.driver import compile as compile_model
from arachnec.executable.folder import read_executable
from tests.distributed.executor_cases import MODEL, QUICK, plain_loop, train_on

pyarrow: Any = pytest.importorskip("pyarrow")


def test_it_trains_the_clips_of_the_list_and_goes_on_where_it_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet

    columns = {"frames": [1, 3, 2, 5, 1, 1, 5, 2, 3, 3], "height": [8] * 10, "width": [8] * 10, "text_tokens": [0] * 10}
    path = tmp_path / "clips.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    (tmp_path / "model.py").write_text(MODEL)
    clips = read_manifest(path).clips
    monkeypatch.setattr(parquet_clips, "LISTED", 9)
    compiled = compile_model(tmp_path / "model.py", path, "2:cpu", passes=QUICK, batch=4)
    folder = compiled.write(tmp_path / "build")
    assert read_executable(folder).clips == clips[:4]
    assert read_executable(folder).header.iterations == 3

    whole = [step["loss"] for step in train_on(2, folder, steps=5)["steps"]]
    assert whole[0] == pytest.approx(plain_loop(folder, clips[:4])[0], rel=1e-5)
    assert len(train_on(1, folder)["steps"]) == 3, "one pass"
    assert len(train_on(1, folder, epochs=2)["steps"]) == 6
    begun = train_on(2, folder, steps=3, checkpoint=tmp_path / "ckpt")["steps"]
    resumed = train_on(2, folder, more=2, checkpoint=tmp_path / "ckpt", resume=True)["steps"]
    assert [step["loss"] for step in (*begun, *resumed)] == pytest.approx(whole, rel=1e-6)
