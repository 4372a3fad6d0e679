"""Of two ranks of a host that need one kernel, one compiles it while the other waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[4]


def test_a_kernel_is_compiled_by_one_process_at_a_time_and_once_in_each(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    case = [sys.executable, "-m", "tests.distributed.launch.machines.kernel_cases", str(tmp_path / "locks")]
    started = [
        subprocess.Popen([*case, pace], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
        for pace in ("slowly", "fast")
    ]  # fmt: skip
    spans = []
    for process in started:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        (begins, begun), (ends, ended) = (line.split() for line in output.splitlines())
        assert (begins, ends) == ("begins", "ends")
        spans.append((float(begun), float(ended)))
    first, second = sorted(spans)
    assert first[1] <= second[0]
    assert len(list((tmp_path / "locks").iterdir())) == 1
