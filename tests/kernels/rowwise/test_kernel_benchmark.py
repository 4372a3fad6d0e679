"""The kernel benchmark: its checks hold on this machine, and without a GPU it says so and times nothing."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.slow import SLOW
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[3]
LARGEST_ERROR = 2e-5


@pytest.fixture(scope="module")
def speed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernels_benchmark", ROOT / "benchmarks" / "kernels" / "speed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ["batch 1", "batch 4", "packed"])
def test_every_case_equals_its_eager_form_in_outputs_and_gradients(speed: ModuleType, layout: str) -> None:
    cases = list(speed.cases(64, 256, layout, torch.float32, torch.device("cpu")))
    assert len(cases) == 6
    for case in cases:
        assert max(speed.errors(case)) < LARGEST_ERROR, case.kernel


@SLOW
def test_without_a_gpu_it_says_so_and_keeps_no_times(tmp_path: Path) -> None:
    command = [warm_python(), "benchmarks/kernels", "--hidden", "1536", "--layouts", "packed", "--tokens", "1024"]
    command += ["--output", str(tmp_path / "found.json")]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=hidden)
    assert done.returncode == 0, done.stderr
    assert "no CUDA device: nothing is timed" in done.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["device"].startswith("none") and report["results"]
    assert not any(key.endswith("_ms") for row in report["results"] for key in row)
    assert all(0 < row["registers"] <= 255 and row["spilled"] <= 8 for row in report["results"])
    assert len(report["estimates"]) == 12 and all(0 < row["estimated_of_copy"] < 1 for row in report["estimates"])


@SLOW
def test_on_a_gpu_it_checks_times_and_keeps_every_kernel_beside_its_peers(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    command = [sys.executable, "tests/kernels/dry_benchmark.py", "--hidden", "128", "--layouts", "packed"]
    command += ["--tokens", "12", "--compile-at", "12", "--dtype", "fp32", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert not report["wrong"] and max(report["worst_error"].values()) < LARGEST_ERROR
    assert len(report["results"]) == len(report["worst_error"]) == 6
    for row in report["results"]:
        assert all(row[form]["backward_ms"] == 0.5 for form in ("fused", "eager", "compiled")), row["left_out"]
        assert row["left_out"] == ({"liger": "not installed"} if row["kernel"] == "norm, modulate" else {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: Triton's kernels cannot run")
@pytest.mark.parametrize("layout", ["batch 1", "batch 4", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [1536, 5120])
def test_on_a_gpu_every_kernel_is_that_of_float64_and_gives_the_same_bits_twice(
    speed: ModuleType, hidden: int, dtype: torch.dtype, layout: str
) -> None:
    for case in speed.cases(1560, hidden, layout, dtype, torch.device("cuda")):
        assert max(speed.errors(case)) <= speed.TOLERANCE[dtype], case.kernel
