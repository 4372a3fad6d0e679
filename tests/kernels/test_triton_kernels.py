"""The Triton kernels against float64, in Triton's interpreter, which a variable starts for a whole process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROUNDING = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.6e-2}


@pytest.mark.parametrize("kernels", ["norm", "rope", "gelu", "gate"])
def test_every_output_and_gradient_is_that_of_float64_to_the_rounding_of_its_storage(kernels: str) -> None:
    command = [sys.executable, str(HERE / f"interpreted_{kernels}.py")]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)
    wrong = {
        f"{case}: {name}": error
        for case, errors in cases.items()
        for name, error in errors.items()
        if not error <= next(bound for dtype, bound in ROUNDING.items() if dtype in case.split())
    }
    assert cases and not wrong
