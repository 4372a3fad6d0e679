"""What it saves that several ranks can encode one clip: HunyuanVideo's nine iterations with its VAE, predicted.

    python benchmarks/divided_encoders.py [--clusters 2x8:h100-80g,8x8:h100-80g] [--iterations 9] [--json FILE]
    python benchmarks/processor_time.py divided_encoders.py ...      where other programs run beside it

Every iteration is planned twice: with encoders that are divided, and with encoders of which one rank encodes a whole
clip. Times are those of the device specs, simulated, so ratios mean more than milliseconds. FILE gets a row after every
iteration, and keeps those of other clusters.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.data.manifest import read_manifest
from arachnec.driver import front_end, plan_iteration, plan_model, trace_file
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module, Phase
from arachnec.models.file import load_model_file
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.report import simulation_report

MODEL = Path(__file__).parent / "models" / "hunyuanvideo_vae.py"
DATA = Path(__file__).parent / "data" / "hunyuan_720p_129f.jsonl"
CLUSTERS = "2x8:h100-80g,8x8:h100-80g"


def whole(module: Module) -> Module:
    """The same stages, of which no encoder can be divided."""
    stages = tuple(replace(stage, attrs=stage.attrs.updated(divides=None)) for stage in module.stages)
    return replace(module, stages=stages)


def planned(model: Module, pipeline: Pipeline, number: int) -> tuple[float, int] | str:
    """Simulated ms of an iteration, and the largest degree of an `encode` cascade; or why there is no plan."""
    try:
        module, planning = plan_iteration(model, pipeline, number)
    except UserError as error:
        return str(error).splitlines()[0]
    report = simulation_report(module, simulate(module), planning)
    ms = report["iteration_ms"]
    assert isinstance(ms, float)
    return ms, max(cascade.degree for cascade in module.cascades if cascade.phase is Phase.ENCODE)


def kept(results: Path | None) -> bool:
    return results is not None and results.is_file()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--iterations", type=int, default=9)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = json.loads(options.json.read_text())["rows"] if kept(options.json) else []
    manifest = read_manifest(DATA, batch=None)
    clusters = options.clusters.split(",")
    traced = front_end(trace_file(load_model_file(options.model), manifest), manifest, parse_cluster(clusters[0]))
    for stage in traced.stages:
        print(
            stage.name,
            {name: stage.attrs[name] for name in ("divides", "undivided", "exchanges") if name in stage.attrs},
        )
    print(f"{'cluster':>14} {'iter':>4} {'whole s':>9} {'divided s':>9} {'ratio':>6} {'degree':>6}")
    for cluster in clusters:
        here, pipeline = replace(traced, cluster=parse_cluster(cluster)), Pipeline.parse(PIPELINES["default"])
        models = [
            plan_model(module, pipeline)[0] for module in (whole(here), here)
        ]  # a layout is chosen once for a run
        totals = [0.0, 0.0]
        for number in range(options.iterations):
            results = [planned(model, pipeline, number) for model in models]
            times = [result[0] / 1e3 for result in results if not isinstance(result, str)]
            if len(times) < 2:
                print(f"{cluster:>14} {number:>4} {results}", flush=True)
                continue
            totals = [total + time for total, time in zip(totals, times, strict=True)]
            degree = results[1][1]
            print(
                f"{cluster:>14} {number:>4} {times[0]:9.3f} {times[1]:9.3f} {times[0] / times[1]:6.3f} {degree:>6}",
                flush=True,
            )
            row = {"cluster": cluster, "iteration": number, "whole_s": times[0], "divided_s": times[1]}
            row["degree"] = degree
            rows = [other for other in rows if (other["cluster"], other["iteration"]) != (cluster, number)] + [row]
            if options.json:
                options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        if totals[1]:
            print(f"{cluster:>14}  all {totals[0]:9.3f} {totals[1]:9.3f} {totals[0] / totals[1]:6.3f}", flush=True)


if __name__ == "__main__":
    main()
