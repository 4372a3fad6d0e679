"""A link between two stages drops to a tenth and recovers: k that follows what is measured, against fixed k = 1.

    python -m benchmarks.pipelines.adaptive_k [--steps 14] [--json FILE]

Two hosts as network namespaces, one rank each, two equal stages, eight equal clips. Both plans take their steps in
turn, so that a busy machine slows both. The links have --mbit, then a tenth of it, then --mbit again, for so many steps
each. A phase's first steps, until the plans have followed, are reported apart. Needs root and iproute2; says so where
it cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from arachnec.driver import compile as compile_model
from arachnec.models.file import load_model_file
from benchmarks.hosts.fabric import Fabric, hosts, unavailable
from benchmarks.pipelines.adaptive_k_model import INNER, TOKENS, WIDTH

HERE = Path(__file__).parent
MODEL, WORKER = HERE / "adaptive_k_model.py", "benchmarks.pipelines.adaptive_k_worker"
CLIPS = 8
PLANS = {"fixed": "schedule=kfkb,k=1,degree=1", "adaptive": "schedule=kfkb,degree=1"}
PHASES = ("good", "a tenth", "good again")
LAG = 7  # steps of a phase until plans have followed at the latest: what is compared, every 4, and two steps' plans


def sustained() -> float:
    """TFLOP/s of one thread in the model's forward and backward."""
    torch.set_num_threads(1)
    model = load_model_file(MODEL).build()
    x = torch.randn(1, TOKENS, WIDTH)
    times = []
    for _ in range(6):
        begun = time.process_time()
        model(x).square().mean().backward()
        times.append(time.process_time() - begun)
    return 3 * 2 * 4 * TOKENS * WIDTH * INNER / min(times) / 1e12


def compile_plans(scratch: Path, mbit: float) -> list[Path]:
    clips, cluster = scratch / "clips.jsonl", scratch / "cluster.toml"
    row = {"frames": 1, "height": 8, "width": 8 * TOKENS, "text_tokens": 0}
    clips.write_text("".join(json.dumps({"id": number, **row}) + "\n" for number in range(CLIPS)))
    cluster.write_text(
        f'nodes = 2\ngpus = 1\ndevice = "cpu"\nmemory = "4 GiB"\nflops = "{sustained():.6f} TFLOP/s"\n'
        f'inter = "{mbit / 8000:.6f} GB/s"\ninter_latency = "200 us"\n'
    )
    folders = []
    for name, schedule in PLANS.items():
        passes = f"stages{{p=2}},partition{{policy=single}},annotate,schedule-pipeline{{{schedule}}},lower,check"
        folders.append(compile_model(MODEL, clips, cluster, passes=passes).write(scratch / name))
    return folders


def measure(mbit: float, steps: int) -> list[dict]:  # type: ignore[type-arg]
    with (
        hosts(Fabric(racks=1, hosts=2, link_mbit=mbit, uplink_mbit=10 * mbit)) as machines,
        tempfile.TemporaryDirectory(prefix="arachnec-") as scratch,
    ):
        folders, output = compile_plans(Path(scratch), mbit), Path(scratch) / "rows.json"
        links = ",".join(str(speed) for speed in (mbit, mbit / 10, mbit))
        path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", WORKER, str(output), machines.name, links, str(steps), *map(str, folders)]
        machines.run(command, environment={"PYTHONPATH": path}, timeout=1200.0)
        rows: list[dict] = json.loads(output.read_text())  # type: ignore[type-arg]
        return rows


def report(rows: list[dict], steps: int) -> None:  # type: ignore[type-arg]
    """Of every phase the median step of both plans, and of the ratios of the pairs of steps."""
    ms = {(row["plan"], row["step"]): row["ms"] for row in rows}
    print("phase        steps        fixed k = 1   adaptive   adaptive / fixed (quartiles)   k")
    for phase, name in enumerate(PHASES):
        first = phase * steps
        for begin, end in ((first + (phase == 0), first + LAG), (first + LAG, first + steps)):
            own = range(begin, end)
            ratios = sorted(ms["adaptive", step] / ms["fixed", step] for step in own)
            low, middle, high = statistics.quantiles(ratios, n=4)
            fixed, adaptive = (statistics.median(ms[plan, step] for step in own) for plan in PLANS)
            k = sorted({row["k"] for row in rows if row["plan"] == "adaptive" and row["step"] in own})
            print(f"{name:12s} {begin:3d} .. {end - 1:3d}  {fixed:8.0f} ms {adaptive:8.0f} ms   "
                  f"{middle:.3f} ({low:.3f} .. {high:.3f})          {', '.join(map(str, k))}")  # fmt: skip
    losses: dict[int, set[float]] = {}
    for row in rows:
        losses.setdefault(row["step"], set()).add(row["loss"])
    print(f"largest relative difference of the losses: {max(max(v) / min(v) - 1 for v in losses.values()):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14, help="of each phase and plan")
    parser.add_argument("--mbit", type=float, default=500.0, help="of the good link")
    parser.add_argument("--json", type=Path, help="keep what was measured here")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    rows = measure(options.mbit, options.steps)
    report(rows, options.steps)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
