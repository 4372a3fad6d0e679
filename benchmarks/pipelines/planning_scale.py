"""What planning, lowering and checking a large pipeline takes: processor time of every pass, tracing apart.

    python -m benchmarks.pipelines.planning_scale [--nodes 32] [--stages 8] [--clips 512] [--cell 8] [--schedule 1f1b]
        [--equal]

Wan2.1-14B, its parameters dealt out over cells of so many ranks, on nodes of eight H100. One clip of the bucketed video
mix per micro-batch, or equal clips.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from arachnec.cluster.file import parse_cluster
from arachnec.data.manifest import read_manifest
from arachnec.driver import front_end, trace_file
from arachnec.executable.folder import iteration_of
from arachnec.models.file import load_model_file
from arachnec.passes.infra.pipeline import Pipeline
from benchmarks.traced_stages import HERE, video_mix

MODEL = HERE.parent / "examples" / "wan2_1_14b.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--clips", type=int, default=512)
    parser.add_argument("--cell", type=int, default=8)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--equal", action="store_true")
    options = parser.parse_args()
    clips = [(c.frames, c.height, c.width) for c in video_mix(options.clips, 0)]
    if options.equal:
        clips = [(17, 256, 256)] * options.clips
    keys = ("frames", "height", "width")
    with tempfile.TemporaryDirectory() as name:
        manifest = Path(name) / "clips.jsonl"
        lines = (json.dumps(dict(zip(keys, clip, strict=True)) | {"text_tokens": 256}) + "\n" for clip in clips)
        manifest.write_text("".join(lines))
        read = read_manifest(manifest)
        traced = front_end(trace_file(load_model_file(MODEL), read), read, parse_cluster(f"{options.nodes}x8:h100-80g"))
    passes = (
        f"shard-parameters{{cell={options.cell}}}", f"stages{{p={options.stages}}}", "partition{policy=single}",
        "annotate", f"schedule-pipeline{{schedule={options.schedule}}}", "lower", "check",
    )  # fmt: skip
    module, total = iteration_of(traced, 0), 0.0
    print(
        f"{options.nodes * 8} GPUs, cells of {options.cell}, {options.stages} stages, "
        f"{options.clips} micro-batches, {options.schedule}"
    )
    for text in passes:
        started = time.process_time()
        module = Pipeline.parse(text).run(module)
        took = time.process_time() - started
        total += took
        print(f"  {text:36s} {took:7.2f} s", flush=True)
    instructions = sum(len(program.instructions) for program in module.programs)
    print(f"  together {total:.2f} s of processor time, {instructions} instructions")


if __name__ == "__main__":
    main()
