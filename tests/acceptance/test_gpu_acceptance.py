"""The call for the first GPU works whole on a processor: every section, what it writes, and what ends it early."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.acceptance.warm import EVERYTHING
from tests.slow import quick
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_acceptance.py"
HEAD = {"schema", "dry", "device", "gpus", "torch", "cuda", "triton", "started", "seconds", "right", "sections"}
KEYS = {  # of some row in each section
    "waits": {"call", "ms", "waits", "in_step", "right"},
    "parity": {"plan", "ranks", "dtype", "error", "limit", "right"},
    "ranks": {"tests", "passed", "skipped", "failures", "seconds", "right"},
    "rowwise_kernels": {"kernel", "layout", "tokens", "hidden", "copy_ms", "fused", "eager", "right"},
    "attention": {"form", "tokens", "both_ms", "tflops"},
    "sparse": {"tokens", "density", "forward_ms", "backward_ms", "choice_ms", "both_over_dense"},
    "training": {"tokens", "step_ms", "planned_step_ms", "mfu", "memory_gib", "planned_memory_gib"},
    "profiled": {"frames", "step_ms", "planned_step_ms", "error", "memory_gib"},
    "host_memory": {"lies_in_host", "gradient_error", "loss_error", "step_ms", "whole_step_ms", "from_host", "to_host"},
    "sampling": {"case", "K", "expected_K", "curve", "error", "limit", "right"},
    "sparse_training": {"step_ms", "planned_step_ms", "learning_ms", "dense_step_ms", "layers", "right"},
    "resumed": {"losses", "resumed", "first_step", "error", "limit", "right"},
    "blocks": {"model", "form", "tokens", "error", "forward_ms", "both_ms", "span_ms", "busy_ms", "idle", "kernels"},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_acceptance", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def head(dry: bool = True) -> dict[str, Any]:
    return {"schema": 1, "dry": dry, "device": "none", "gpus": 1}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", quick(list(KEYS), "rowwise_kernels", "attention", "sparse"))
def test_a_dry_call_goes_through_a_section_and_says_that_it_is_dry(name: str, tmp_path: Path) -> None:
    output = tmp_path / "dry.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [warm_python(EVERYTHING), str(SCRIPT), "--dry", "--sections", name, "-o", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(output.read_text())
    assert set(results) == HEAD
    assert results["dry"] is True and "dry" in results["device"] and results["right"] is True
    rows = results["sections"][name]["rows"]
    assert results["sections"][name]["state"] == "done"
    assert any(KEYS[name] <= set(row) for row in rows), f"no row of {name} has {KEYS[name]}"
    if name == "parity":
        assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    if name == "rowwise_kernels":
        checked = {row["kernel"] for row in rows if "error" in row}
        assert len(checked) == 6 and checked == {row["kernel"] for row in rows if "fused" in row}
    if name == "training":
        assert len({row["tokens"] for row in rows}) == 3


def test_every_section_has_a_test(script: ModuleType) -> None:
    assert KEYS.keys() == script.SHARES.keys()


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    command = [warm_python(EVERYTHING), str(SCRIPT), "-o", str(tmp_path / "none.json")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "no CUDA device" in done.stderr
    assert not list(tmp_path.iterdir())


def test_one_wrong_row_makes_the_whole_wrong(script: ModuleType) -> None:
    good = {"state": "done", "rows": [{"right": True}, {"ms": 1.0}]}
    assert script.is_right(good)
    assert not script.is_right({**good, "rows": [*good["rows"], {"right": False}]})
    assert not script.is_right({**good, "rows": []})
    assert not script.is_right({**good, "state": "out of time"})


def test_every_section_fits_a_call_of_ten_minutes(script: ModuleType) -> None:
    assert max(script.SHARES.values()) + script.GRACE_S < 600
