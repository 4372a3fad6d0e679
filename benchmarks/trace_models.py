"""Time and memory of tracing the real configurations, each in a process of its own, on the meta device.

python benchmarks/trace_models.py [wan2_1_14b hunyuanvideo ...] [--json FILE]
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("wan2_1_1_3b", "wan2_1_14b", "cogvideox_2b", "cogvideox_5b", "hunyuanvideo")


def measure(name: str) -> dict[str, object]:
    """Seconds of wall and CPU time and the peak resident memory of this process, imports included."""
    started = time.perf_counter()
    from arachnec.data.manifest import read_manifest
    from arachnec.models.file import load_model_file
    from arachnec.passes.trace import trace_model

    manifest = read_manifest(ROOT / "examples" / "clips_480p.jsonl", batch=None)
    clips = [clip for iteration in manifest.iterations for clip in iteration]
    source = load_model_file(ROOT / "examples" / f"{name}.py")
    imported = time.perf_counter()
    traced = trace_model(source, clips)
    tokens = [traced.tokens(clip) for clip in clips]
    return {
        "model": name,
        "wall_s": round(time.perf_counter() - started, 2),
        "trace_s": round(time.perf_counter() - imported, 2),
        "cpu_s": round(time.process_time(), 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "params": traced.stages[-1].attrs["params"],
        "structures": len(traced.captured.blocks),
        "blocks": len(traced.captured.calls),
        "operations": [len(graph.ops) for graph in traced.graphs],
        "tokens": [min(tokens), max(tokens)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.models[0])))
        return
    rows = []
    for name in arguments.models:
        command = [sys.executable, __file__, name, "--here"]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout))
        print(rows[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
