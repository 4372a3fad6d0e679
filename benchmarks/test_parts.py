"""How long the tests of every part take alone, as `make test PART=...` runs them: two at a time.

    python benchmarks/test_parts.py [--parts solver,house] [--json FILE]

Wall time is that of a machine with nothing else to do, or of real-time priority. Processor time is that of the tests
and of all processes that they start, and the same on a busy machine. What FILE has is not measured again. Ends with 1
where a part takes more than a minute.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PR_SET_CHILD_SUBREAPER = 36
MOST_S = 60.0


def parts() -> list[str]:
    """As `make parts` lists them."""
    tests = ROOT / "tests"
    return sorted({str(file.parent.relative_to(tests)) for file in tests.rglob("test_*.py")})


def used() -> float:
    """s of processor time of all processes that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def measured(part: str) -> dict[str, object]:
    """Of a part and of what lies in its folders: s of processor and of wall time, and how pytest ended."""
    before, begin = used(), time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", f"tests/{part}"]
    status = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL).returncode
    wall = time.perf_counter() - begin
    while True:  # processes that outlived the tests: their time counts, too
        try:
            os.wait()
        except ChildProcessError:
            break
    return {"part": part, "processor_s": round(used() - before, 1), "wall_s": round(wall, 1), "status": status}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="separated by commas; all of them without")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose parents ended become children of this process
    file: Path | None = options.json
    rows = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else []
    wanted = options.parts.split(",") if options.parts else parts()
    print("| part | processor, s | wall, s |\n|---|---|---|")
    for part in wanted:
        row = next((known for known in rows if known["part"] == part), None)
        if row is None:
            row = measured(part)
            rows.append(row)
            if file:
                rows.sort(key=lambda one: one["part"])
                file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        failed = "" if row["status"] == 0 else f" (pytest ended with {row['status']})"
        print(f"| {part} | {row['processor_s']} | {row['wall_s']} |{failed}", flush=True)
    return int(any(row["wall_s"] > MOST_S for row in rows if row["part"] in wanted))


if __name__ == "__main__":
    sys.exit(main())
