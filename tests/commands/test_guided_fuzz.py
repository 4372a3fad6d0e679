"""Coverage-guided fuzzing of all readers, a short run of it: libFuzzer takes over the process, so another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.binary_inputs import BINARY
from tests.commands.test_hostile_input import READERS

ROOT = Path(__file__).parents[2]
RUNS = 60


def test_what_reaches_new_branches_of_readers_ends_with_errors_of_our_own(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed (CONTRIBUTING.md)")
    told = tmp_path / "told.json"
    command = [sys.executable, "-m", "benchmarks.trust.guided_fuzz", "--runs", str(RUNS), "-o", str(told)]
    environment = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    readers = json.loads(told.read_text())["readers"]
    assert set(readers) == {*READERS, *BINARY, "program.cascade"}
    assert all(reader["inputs"] >= RUNS and reader["branches"] > 0 for reader in readers.values()), readers
