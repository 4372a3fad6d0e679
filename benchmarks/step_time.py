"""Measured step time of the default pipeline against `data-parallel`, on the demo's clips, interleaved on this machine.

    python benchmarks/step_time.py [--ranks 2] [--rounds 3] [--steps 5]

Each round runs both executables, one after the other; the first step of every run is left out (allocation, first
batches). Prints the median step of each, the ratio of every round, and the predicted ratio. Loss per step must agree:
the plan may change the speed only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo"
PIPELINES = ("default", "data-parallel")


def arachnec(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "arachnec", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    cluster = f"{options.ranks}:cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clips, profile = folder / "clips.jsonl", folder / "profile.json"
        subprocess.run([sys.executable, DEMO / "make_clips.py", clips], check=True, stdout=subprocess.DEVNULL)
        common = (DEMO / "model.py", "--data", clips, "--cluster", cluster)
        arachnec("profile", *common, "-o", profile)
        for pipeline in PIPELINES:
            arachnec("compile", *common, "--profile", profile, "--passes", pipeline, "-o", folder / pipeline)
        times: dict[str, list[list[float]]] = {pipeline: [] for pipeline in PIPELINES}
        losses: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for pipeline in PIPELINES:
                report = folder / f"{pipeline}.json"
                arachnec("run", folder / pipeline, "--steps", options.steps, "--report", report)
                steps = json.loads(report.read_text())["steps"]
                times[pipeline].append([step["step_ms"] for step in steps[1:]])
                losses[pipeline] = [step["loss"] for step in steps]
        planned = {p: json.loads((folder / p / "report.json").read_text())["iteration_ms"] for p in PIPELINES}

    print(f"{options.ranks} ranks, {options.rounds} interleaved rounds of {options.steps} steps")
    for pipeline in PIPELINES:
        every = sorted(t for run in times[pipeline] for t in run)
        print(
            f"  {pipeline:14s} median {statistics.median(every):8.1f} ms   min {every[0]:8.1f}   max {every[-1]:8.1f}"
            f"   predicted {planned[pipeline]:8.1f}"
        )
    ratios = [
        statistics.median(ours) / statistics.median(theirs)
        for ours, theirs in zip(times["default"], times["data-parallel"], strict=True)
    ]
    print(f"  default / data-parallel, measured per round: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    print(f"  default / data-parallel, predicted: {planned['default'] / planned['data-parallel']:.3f}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(*losses.values(), strict=True))
    print(f"  largest relative difference of the losses: {worst:.1e}")


if __name__ == "__main__":
    main()
