"""How long steps wait for their plans, and what proving the next one beside them costs, by the number of ranks.

python benchmarks/exposed_planning.py [--cluster 32x8:h100-80g] [--output benchmarks/results/exposed_planning.json]

One process is rank 0 of a run that is planned for the cluster: the planner makes each plan in a process of its own,
a thread reads and proves it, as in a run. A step takes ``--step`` seconds, in which this
thread does what a host does that is ahead of its device, one small operation after the other. ``slower`` is how many
fewer of them it does a second while plans are made and proved. The first plan waited for has the planner's own start in
it, which in a run has the time that weights take to build and send.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.plans.step_plans import Plans, checked_program
from arachnec.driver import compile as compile_model
from arachnec.executable.folder import read_executable
from arachnec.ir.printer import print_module

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "exposed_planning.json"
SHAPES = ((1, 256, 256), (17, 256, 256), (33, 320, 512), (49, 256, 256), (65, 480, 832), (81, 480, 832))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", default="32x8:h100-80g")
    parser.add_argument("--clips", type=int, default=512, help="of an iteration")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--step", type=float, default=15.0, help="seconds that a step takes")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "clips.jsonl"
        data.write_text("".join(row(step, n) for step in range(options.steps) for n in range(options.clips)))
        build = Path(folder) / "build"
        compile_model(ROOT / "examples" / "plain_dit.py", data, options.cluster).write(build)
        executable = read_executable(build)
        assert executable.program.cluster is not None
        world = executable.program.cluster.world
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        text = print_module(executable.program)
        started = time.perf_counter()
        checked_program(text, "the compiled plan")
        proving = (time.perf_counter() - started) * 1e3
        plans = Plans(executable, 0, world)
        exposed, rates = run(plans, options.steps, options.step)
        plans.close()
        dist.destroy_process_group()
    result = {
        "first_exposed_ms": round(exposed[0], 2),
        "exposed_ms": [round(value, 2) for value in exposed[1:]],
        "worst_exposed_ms": round(max(exposed[1:]), 2),
        "proving_ms": round(proving, 1),
        "slower": round(1 - min(rates) / max(rates), 4),
        "step_s": options.step,
        "ranks": world,
        "clips": options.clips,
        "cores": os.cpu_count(),
    }
    print(json.dumps(result, indent=2))
    options.output.write_text(json.dumps(result, indent=2) + "\n")


def row(step: int, number: int) -> str:
    frames, height, width = SHAPES[(number * 7 + step) % len(SHAPES)]
    return json.dumps({"frames": frames, "height": height, "width": width, "text_tokens": 64, "iteration": step}) + "\n"


def run(plans: Plans, steps: int, seconds: float) -> tuple[list[float], list[float]]:
    """ms that every step but the first waits for its plan, and how many operations a second it does."""
    exposed: list[float] = []
    rates: list[float] = []
    value = torch.ones(64)
    for number in range(steps):
        started = time.perf_counter()
        plans.get(number)
        plans.prepare((number + 1) % steps)
        if number:
            exposed.append((time.perf_counter() - started) * 1e3)
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            value = value * 0.5
            count += 1
        rates.append(count / (time.perf_counter() - started))
    return exposed, [statistics.mean(rates[:-1]), rates[-1]]


if __name__ == "__main__":
    main()
