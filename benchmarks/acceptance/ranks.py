"""The tests of several ranks, with all ranks on one GPU over NCCL: schedules, cells, host memory, attention, encoders.

NCCL takes the ranks for hosts of their own (``tests/distributed/rank_device.py``), so what waits for what is as on a
cluster; nothing here is timed. A row is one file of tests. Tests of more ranks than one GPU serves are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from acceptance.machine import Machine, Row

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "distributed"
PARTS = ("attention", "executor/stages", "executor/cells", "executor/gradients", "executor/encoders", "executor/runs")
DRY = ("executor/cells/test_layer_calls.py",)
WORKERS, EACH_S, SPARE_S = 1, 90, 5.0  # ranks of several worlds would take turns on the GPU
MOST = 4  # ranks on one GPU, whose kernels take turns: a collective of four takes 7 to 110 ms
CPU_ALONE = (
    "test_collectives.py",  # gloo's own ways, and the emulator of NCCL
    "test_exchange.py",
    "test_executor_ncclish.py",
    "test_host_ahead_of_host_memory.py",
)


def rows(machine: Machine) -> Iterator[Row]:
    for part in DRY if machine.dry else PARTS:
        if machine.left < SPARE_S:
            yield {"part": part, "left_out": "no time was left", "right": False}
            continue
        report = machine.scratch / "report.xml"
        report.unlink(missing_ok=True)
        device = {} if machine.dry else {"ARACHNEC_TEST_DEVICE": "cuda", "ARACHNEC_TEST_RANKS": str(MOST)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **device}
        command = tested(TESTS / part, report, "0" if machine.dry else str(WORKERS))
        subprocess.run(command, env=environment, cwd=ROOT, timeout=machine.left, check=False)
        if not report.exists():
            yield {"part": part, "failures": ["pytest wrote no report"], "right": False}
            continue
        yield from rows_of(report)


def tested(part: Path, report: Path, workers: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, f"--timeout={EACH_S}", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=", f"--junitxml={report}", str(part)]
    return [*command, *(f"--ignore-glob=*/{name}" for name in CPU_ALONE)]


def rows_of(report: Path) -> Iterator[Row]:
    """One for each file of tests: how many passed and were skipped, and which failed."""
    files: dict[str, list[ET.Element]] = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        files.setdefault(case.get("classname", ""), []).append(case)
    for name, cases in sorted(files.items()):
        failed = [str(c.get("name")) for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = sum(c.find("skipped") is not None for c in cases)
        seconds = sum(float(c.get("time", 0)) for c in cases)
        row = {"tests": name, "passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failures": failed}
        yield {**row, "seconds": round(seconds, 1), "right": not failed}
