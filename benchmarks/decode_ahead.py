"""How much of the time that videos take to decode is hidden behind training.

python benchmarks/decode_ahead.py [--steps 6] [--output benchmarks/results/decode_ahead.json]

The demo's model on clips of the demo's real videos: one rank of one thread, one thread that loads, two cores. Three
trainers take turns in blocks of steps: one that loads ahead, one whose frames were decoded before (so that loading
takes no time), and one that loads where it encodes. ``decode_ms`` is what decoding a step's clips takes alone.
hidden = 1 - (step ahead - step on cached frames) / decode, of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.driver import compile as compile_model
from arachnec.executable.folder import Executable, read_executable
from arachnec.models import encoders

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "demo"
RESULT = Path(__file__).parent / "results" / "decode_ahead.json"
MOST_FRAMES = 17  # of a clip: one thread takes seconds for longer ones
BLOCK = 3  # steps, of which the first does not count: what it needs was loaded before
decode = encoders.read_frames
cached = cache(decode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6, help="that count, of each trainer")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "clips.jsonl"
        subprocess.run([sys.executable, DEMO / "make_clips.py", manifest], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in manifest.read_text().splitlines()]
        chosen = [line for line in lines if line["frames"] <= MOST_FRAMES]
        for line in chosen:
            line.pop("iteration", None)
            if "path" in line:
                line["path"] = str((manifest.parent / line["path"]).resolve())
        manifest.write_text("".join(json.dumps(line) + "\n" for line in chosen))
        compile_model(DEMO / "model.py", manifest, "1:cpu", batch="all").write(Path(folder) / "build")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        result = measure(read_executable(Path(folder) / "build"), options.steps)
        dist.destroy_process_group()
    print(json.dumps(result, indent=2))
    options.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(executable: Executable, steps: int) -> dict[str, object]:
    reading: dict[str, Callable[..., torch.Tensor]] = {"ahead": decode, "cached": cached, "in place": decode}
    trainers = {name: Trainer(executable, RunOptions(), torch.device("cpu")) for name in reading}
    trainers["in place"]._context.loads.want = lambda step, clips: None  # type: ignore[method-assign]
    times: dict[str, list[float]] = {name: [] for name in reading}
    decoding: list[float] = []
    number = 0
    while len(times["ahead"]) < steps:
        for name, trainer in trainers.items():
            encoders.read_frames = reading[name]
            for step in range(number, number + BLOCK):
                took = trainer.step(step).step_ms
                print(f"step {step} {name}: {took:.0f} ms", file=sys.stderr, flush=True)
                if step > number and number:
                    times[name].append(took)
        number += BLOCK
        decoding.append(decode_all(executable))
    for trainer in trainers.values():
        trainer.close()
    median = {name: statistics.median(values) for name, values in times.items()}
    alone = statistics.median(decoding)
    return {
        "hidden": round(1 - (median["ahead"] - median["cached"]) / alone, 4),
        "decode_ms": round(alone, 2),
        **{f"step_{name.replace(' ', '_')}_ms": round(value, 2) for name, value in median.items()},
        "clips": len(executable.clips),
        "steps": len(times["ahead"]),
        "cores": os.cpu_count(),
    }


def decode_all(executable: Executable) -> float:
    """ms that the clips of a step take to decode, one after the other in this thread."""
    vae = executable.model_file().encoders()["vae"]  # type: ignore[misc]
    encoders.read_frames = decode
    started = time.perf_counter()
    for clip in executable.clips:
        vae.load(clip, torch.device("cpu"))  # type: ignore[operator]
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main()
