"""Where text encoders do not fit whole: over how many ranks they are divided, and what a device then holds, predicted.

    python benchmarks/divided_text_encoders.py [--clusters 1x8:l20-48g,...] [--output FILE.json]

Wan2.1 14B with UMT5-XXL, and HunyuanVideo with encoders as large as its own, a Llama of 8B and CLIP's: traced on the
meta device, planned by the default pipeline for one global batch of eight short clips. Times are those of device specs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from arachnec.cluster.file import parse_cluster
from arachnec.data.manifest import read_manifest
from arachnec.driver import front_end, plan_iteration, plan_model, trace_file
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module, Phase, quantity
from arachnec.ir.tensor_parallel import divided_encoders
from arachnec.models.file import load_model_file
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.report import plan_report

HERE = Path(__file__).parent
RESULT = HERE / "results" / "divided_text_encoders.json"
MODELS = {"Wan2.1-14B": "wan2_1_14b_text.py", "HunyuanVideo": "hunyuanvideo_text.py"}
CLUSTERS = "1x8:l20-48g,2x8:l20-48g,1x8:h100-80g,1x4:l20-48g"
CLIPS = 8  # of 17 x 256 x 256, with a caption of 64 tokens


def state(module: Module, name: str) -> float:
    return round(quantity(module.stage(name).attrs["state"]), 2)


def planned(traced: Module, cluster: str) -> dict[str, Any]:
    """What the default pipeline does on a cluster, or why it refuses."""
    pipeline = Pipeline.parse("default")
    try:
        model, model_ms = plan_model(replace(traced, cluster=parse_cluster(cluster)), pipeline)
        module, ms = plan_iteration(model, pipeline, 0)
    except UserError as error:
        return {"refused": " ".join(str(error).split())}
    report = plan_report(module, model_ms + ms)
    names = [stage.name for stage in module.stages if not stage.trained]
    encodes = {cascade.stage: cascade for cascade in module.cascades if cascade.phase is Phase.ENCODE}
    return {
        "layout": str(module.attrs.get("layout")),
        "tensor_parallel": divided_encoders(module),
        "encoder_gib_on_each_rank": {name: state(module, name) for name in names},
        "encode_ms": {name: round(encodes[name].end - encodes[name].start, 3) for name in names},
        "iteration_ms": round(report["iteration_ms"], 1),
        "peak_memory_gib": round(report["peak_memory_gib"], 2),
    }


def traced(model: str) -> Module:
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder, "clips.jsonl")
        row = {"frames": 17, "height": 256, "width": 256, "caption": "a dog runs", "text_tokens": 64, "clips": CLIPS}
        manifest.write_text(json.dumps(row) + "\n")
        clips = read_manifest(manifest, batch=None)
        return front_end(
            trace_file(load_model_file(HERE / "models" / model), clips), clips, parse_cluster("1x8:l20-48g")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="those to trace again; the file keeps the others")
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.is_file() else {}
    for name in options.models.split(","):
        module = traced(MODELS[name])
        encoders = {
            stage.name: {
                "state_gib": state(module, stage.name),
                "tensor_split_gib": round(quantity(stage.attrs["tensor_split"]), 2),
                "tensor_units": stage.attrs["tensor_units"],
                "exchanges": stage.attrs["exchanges"],
                "undivided": stage.attrs["undivided"],
            }
            for stage in module.stages
            if not stage.trained
        }
        results[name] = {"encoders": encoders, "plans": {}}
        print(name, encoders, flush=True)
        for cluster in options.clusters.split(","):
            results[name]["plans"][cluster] = row = planned(module, cluster)
            print(f"{cluster:>14}", row, flush=True)
            options.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
