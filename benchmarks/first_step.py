"""Seconds from `arachnec run` to the end of the first step of a compiled run.

    python benchmarks/first_step.py [BUILD] [--rounds 3]

BUILD is an executable's folder, by default that of `make demo`. Every round is a launch of its own. Told are the
seconds until the check on small tensors was done, the ranks had set up, and the first step had ended.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

TOLD = {"checked": "steps of a small model", "set up": "from step 0 on", "first step": "step     0 "}


def launched(build: Path) -> dict[str, float]:
    """Seconds from the launch to the first line that has each of the texts."""
    command = [sys.executable, "-u", "-m", "arachnec", "run", str(build), "--steps", "1"]
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            for name, text in TOLD.items():
                if text in line:
                    seconds.setdefault(name, time.perf_counter() - started)
    if process.returncode or "first step" not in seconds:
        raise SystemExit(f"the run ended with {process.returncode} after {seconds}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", nargs="?", type=Path, default=Path("demo-output/default"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [launched(options.build) for _ in range(options.rounds)]
    for name in TOLD:
        seconds = [told[name] for told in rounds if name in told]
        print(f"{name:10s} {statistics.median(seconds):6.1f} s   ({', '.join(f'{s:.1f}' for s in seconds)})")


if __name__ == "__main__":
    main()
