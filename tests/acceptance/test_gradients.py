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

from arachnec.data.manifest import read_manifest
from arachnec.ir.diagnostic import UserError
from arachnec.models.file import load_model_file
from arachnec.passes.trace import trace_model

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def load_benchmark():
    spec = importlib.util.spec_from_file_location("gradient_parity", ROOT / "benchmarks" / "gradient_parity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parity = load_benchmark()


@pytest.mark.parametrize(("model", "plan"), [("wan", "skewed"), ("joint_streams", "mixed")])
def test_saved_gradients_equal_those_of_a_plain_loop(model: str, plan: str, tmp_path: Path) -> None:
    file, clips = HERE / "models" / f"{model}.py", HERE / "clips.jsonl"
    loss = plain_loop(file, clips, tmp_path / "expected.safetensors")
    build, gradients = tmp_path / "build", tmp_path / "found.safetensors"
    passes = ["--passes", parity.PLANS[plan], "--load", str(HERE / "passes.py")]
    parity.command("compile", file, "--data", clips, "--cluster", "4:cpu", "-o", build, *passes)
    parity.command("run", build, "--ranks", 4, "--steps", 1, "--save-gradients", gradients)
    error, worst = parity.compare(tmp_path / "expected.safetensors", gradients)
    assert error <= parity.GRADIENT, worst
    found = json.loads((build / "run.json").read_text())["steps"][-1]["loss"]
    assert abs(found - loss) <= parity.LOSS * abs(loss)
    program = (build / "program.cascade").read_text()
    assert {degree for degree in (1, 2, 3, 4) if f"degree = {degree}," in program} == parity.DEGREES[plan]


def plain_loop(file: Path, clips: Path, gradients: Path) -> float:
    """In a process of its own, that imports the model file and PyTorch."""
    code = (
        "import gradient_parity as parity; from pathlib import Path; import sys; "
        "print(parity.plain_loop(Path(sys.argv[1]), parity.read_clips(Path(sys.argv[2])), Path(sys.argv[3])))"
    )
    path = os.pathsep.join(map(str, [ROOT, ROOT / "benchmarks", HERE / "models"]))
    done = subprocess.run(
        [sys.executable, "-c", code, str(file), str(clips), str(gradients)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    return float(done.stdout.splitlines()[-1])


def test_a_model_that_cannot_be_split_is_refused_when_it_is_compiled() -> None:
    file = HERE / "models" / "mixes_factorised.py"
    with pytest.raises(RuntimeError, match="REFUSED") as refusal:
        parity.command("compile", file, "--data", HERE / "clips.jsonl", "--cluster", "4:cpu")
    assert "Factorised depends on `frames`, which is 3 in one call and 5 in another" in str(refusal.value)
    assert "Traceback" not in str(refusal.value)


def test_a_block_that_fixes_a_size_is_refused_at_the_line_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE / "models"))
    clips = read_manifest(HERE / "clips.jsonl").clips
    with pytest.raises(UserError) as refusal:
        trace_model(load_model_file(HERE / "models" / "size_logarithm.py"), clips)
    (diagnostic,) = refusal.value.diagnostics
    assert diagnostic.reason.startswith("it fixes a size that changes from clip to clip")
    assert "math.log" in (HERE / "models" / "size_logarithm.py").read_text().splitlines()[diagnostic.span.line - 1]
