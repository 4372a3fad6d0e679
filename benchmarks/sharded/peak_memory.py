"""Resident memory that ranks really use against what the plan counts: stages and cells on gloo ranks of this machine.

    python -m benchmarks.sharded.peak_memory [--ranks 2] [--width 512] [--tokens 256]

For every plan and rank, in MiB: the most that the plan counts at any instruction; the peak of the process's resident
memory, from the drawing of the weights to the third step, less that of an idle process: a rank that runs the same plan
for the same model, 16 wide; and the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values
from arachnec.driver import compile as compile_model
from arachnec.launch.local_ranks import launch
from benchmarks.pipelines.torch_peer import MODEL, clips

IDLE = 16  # wide: a model of next to nothing
WORKER = "benchmarks.sharded.peak_memory_rank"
_PIPELINE = "partition{policy=single},annotate,schedule-pipeline"
_END = "partition{policy=single},annotate,schedule-static,place,bucket,lower,check"


def plans(ranks: int) -> dict[str, str]:
    def staged(stages: int, schedule: str) -> str:
        return f"stages{{p={stages}}},{_PIPELINE}{{schedule={schedule},recompute=false}},lower,check"

    return {
        f"{ranks} stages, 1f1b": staged(ranks, "1f1b"),
        f"{ranks} stages, zb-h1": staged(ranks, "zb-h1"),
        f"{2 * ranks} stages, zb-v": staged(2 * ranks, "zb-v"),
        f"cells of {ranks}": f"shard-parameters{{cell={ranks}}},{_END}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=4)
    options = parser.parse_args()
    print(
        f"{options.ranks} ranks, width {options.width}, {options.micro_batches} clips of {options.tokens} tokens; MiB"
    )
    print(f"{'plan':22s} rank  planned  resident  ratio")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = folder / "clips.jsonl"
        manifest.write_text(clips([options.tokens] * options.micro_batches))
        for plan, passes in plans(options.ranks).items():
            peaks = {}
            for width in (IDLE, options.width):
                model, build = folder / "model.py", folder / f"{plan} {width}"
                model.write_text(MODEL.read_text().replace("WIDTH, HEADS = 192", f"WIDTH, HEADS = {width}"))
                compiled = compile_model(model, manifest, f"{options.ranks}:cpu", passes=passes)
                compiled.write(build)
                launch(options.ranks, [str(build)], lambda _: None, worker=WORKER)
                peaks[width] = json.loads((build / "peak.json").read_text())
            values = Values(compiled.module)
            for rank, program in enumerate(compiled.module.programs):
                planned = high_water(values, program).total * 1024
                own = peaks[options.width][rank] - peaks[IDLE][rank]
                worst = max(worst, own / planned)
                print(f"{plan:22s} {rank:4d} {planned:8.1f} {own:9.1f} {own / planned:6.3f}", flush=True)
    print(f"at worst {worst - 1:+.1%} of the plan")


if __name__ == "__main__":
    main()
