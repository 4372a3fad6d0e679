"""Gradients that `arachnec run` saves against a plain PyTorch loop, by the command line; the sweep of all models is
benchmarks/gradient_parity.py."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arachnec.cli import run
from arachnec.data.manifest import read_manifest
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import load_model_file
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.sample import example_calls
from tests.acceptance.warm import EVERYTHING
from tests.slow import SLOW
from tests.warm_python import warm_python

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLIPS = HERE / "clips.jsonl"


def load_benchmark():
    spec = importlib.util.spec_from_file_location("gradient_parity", ROOT / "benchmarks" / "gradient_parity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parity = load_benchmark()


def test_gradients_saved_by_the_command_line_equal_those_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python(EVERYTHING))
    file, build, gradients = HERE / "models" / "joint_streams.py", tmp_path / "build", tmp_path / "found.safetensors"
    loss, expected = in_a_process_of_its_own(LOOP, file, tmp_path)
    passes = ["--passes", parity.PLANS["mixed"], "--load", str(HERE / "passes.py")]
    parity.command("compile", file, "--data", CLIPS, "--cluster", "4:cpu", "-o", build, *passes)
    parity.command("run", build, "--ranks", 4, "--steps", 1, "--save-gradients", gradients)
    actual = json.loads((build / "run.json").read_text())["steps"][-1]["loss"]
    assert_equal(expected, gradients, loss, actual)
    assert degrees_of(build) == parity.DEGREES["mixed"]


@SLOW
def test_gradients_saved_by_ranks_that_were_forked_equal_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Another model and plan, as benchmarks/gradient_parity.py runs them: traced once, not by every rank."""
    file = HERE / "models" / "wan.py"
    loss, expected = in_a_process_of_its_own(LOOP, file, tmp_path)
    actual, gradients = in_a_process_of_its_own(PLAN, file, tmp_path, "skewed")
    assert actual is not None, gradients
    assert_equal(expected, gradients, loss, actual)
    assert degrees_of(tmp_path / "skewed") == parity.DEGREES["skewed"]


def assert_equal(expected: str, gradients: str | Path, loss: float, actual: float) -> None:
    error, worst = parity.compare(Path(expected), Path(gradients))
    assert error <= parity.GRADIENT, worst
    assert abs(actual - loss) <= parity.LOSS * abs(loss)


def degrees_of(build: Path) -> set[int]:
    program = (build / "program.cascade").read_text()
    return {degree for degree in (1, 2, 3, 4) if f"degree = {degree}," in program}


START = """
import json, sys
from pathlib import Path
import gradient_parity as parity
file, clips, folder, plans = *map(Path, sys.argv[1:4]), sys.argv[4:]
"""
LOOP = """
expected = folder / "expected.safetensors"
print(json.dumps([parity.plain_loop(file, parity.read_clips(clips), expected), str(expected)]))
"""
PLAN = """
import torch
torch.set_num_threads(1)
((found, told),) = parity.run_plans(file, clips, {plan: parity.PLANS[plan] for plan in plans}, folder).values()
print(json.dumps([found, str(told)]))
"""


def in_a_process_of_its_own(code: str, file: Path, folder: Path, *plans: str) -> tuple[float | None, str]:
    """A loss, and the file of its gradients; ``LOOP`` imports the model file and PyTorch."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "benchmarks", HERE / "models"]))
    done = subprocess.run(
        [warm_python(EVERYTHING), "-c", START + code, str(file), str(CLIPS), str(folder), *plans],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )
    loss, told = json.loads(done.stdout.splitlines()[-1])
    return loss, told


@SLOW
def test_a_model_that_one_graph_cannot_serve_is_told_what_it_costs_when_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE / "models"))
    file, two = HERE / "models" / "mixes_factorised.py", tmp_path / "two.jsonl"
    two.write_text("".join(line for line in CLIPS.read_text().splitlines(True) if '"id": "b"' in line or '"d"' in line))
    plan = ["--cluster", "2:cpu", "--passes", "data-parallel"]
    assert run(["compile", str(file), "--data", str(two), *plan]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Factorised depends on `frames`, which is 3 in one call and 5 in another" in said
    assert "every rank captures them again for each shape that it shares" in said


def test_a_block_that_fixes_a_size_says_the_line_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "models"))
    clips = read_manifest(CLIPS).clips
    source = load_model_file(HERE / "models" / "size_logarithm.py")
    model = source.build()
    with pytest.raises(UserError) as refusal:
        capture_blocks(model, example_calls(model, source, clips))
    (diagnostic,) = refusal.value.diagnostics
    assert "it fixes a size that changes from clip to clip" in diagnostic.message
    assert "math.log" in (HERE / "models" / "size_logarithm.py").read_text().splitlines()[diagnostic.span.line - 1]
