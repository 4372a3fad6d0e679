"""Every named pipeline on real training iterations of HunyuanVideo at 720p: simulated iteration times.

    python benchmarks/workload_hunyuan.py [MANIFEST] [--clusters 2x8:h100-80g,8x8:h100-80g] [--iterations 7,8]

A file of rows keeps what is not measured again, pipelines of a row likewise: a long table can be made in parts.
The manifest is nine iterations sampled from Koala-36M, as published with Arachne's artifact; any manifest with
`iteration` will do. The model is traced once, on the meta device. Costs are those of the device specs, so ratios mean
more than the milliseconds. Ends with 1 if the default is slower than another pipeline anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.data.manifest import read_manifest
from arachnec.driver import front_end, plan_iteration, plan_model, trace_file
from arachnec.executable.folder import iteration_of
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.models.file import load_model_file
from arachnec.passes.infra.named_pipelines import NOT_COMPARED, PIPELINES
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.report import simulation_report

MODEL = Path(__file__).parents[1] / "examples" / "hunyuanvideo.py"
DATA = Path(__file__).parent / "data" / "hunyuan_720p_129f.jsonl"
CLUSTERS = "2x8:h100-80g,8x8:h100-80g"
SAME = 1e-3  # relative: closer is a tie
# The default tries the layouts of the others, so that it is not slower; this is what its search finds without them.
ALONE = "default, without baselines"
NAMED = PIPELINES | {ALONE: PIPELINES["default"].replace("schedule-z3", "schedule-z3{baselines=false}")}


def traced_on(model: Path, data: Path, cluster: str) -> Module:
    """The model's stages and every clip of the manifest, for one cluster."""
    manifest = read_manifest(data, batch=None)
    return front_end(trace_file(load_model_file(model), manifest), manifest, parse_cluster(cluster))


def rows(traced: Module, cluster: str, iterations: list[int], pipelines: list[str]) -> Iterator[dict[str, object]]:
    """One row per iteration: of every pipeline ms, planning ms, imbalance, and the bound of the default's cascades."""
    here = replace(traced, cluster=parse_cluster(cluster))
    for number in iterations:
        row: dict[str, object] = {
            "cluster": cluster,
            "iteration": number,
            "clips": len(iteration_of(here, number).clips),
        }
        for name in pipelines:
            try:
                pipeline = Pipeline.parse(NAMED[name])
                model, _ = plan_model(here, pipeline)
                module, planning = plan_iteration(model, pipeline, number)
            except UserError as error:
                row[name] = {"refused": str(error)}
                continue
            report = simulation_report(module, simulate(module), planning)
            row[name] = {key: round(report[key], 4) for key in ("iteration_ms", "bound_ms", "imbalance", "planning_ms")}
        print(line(row, pipelines), flush=True)
        yield row


def line(row: dict[str, object], pipelines: list[str]) -> str:
    """Iteration time in seconds under every pipeline's name."""
    times = [milliseconds(row, name) for name in pipelines]
    cells = " ".join("   refused" if t is None else f"{t / 1e3:10.3f}" for t in times)
    return f"{row['cluster']:>14} {row['iteration']:>4} {row['clips']:>5} {cells}"


def milliseconds(row: dict[str, object], name: str) -> float | None:
    cell = row[name]
    assert isinstance(cell, dict)
    return cell.get("iteration_ms")


def write(path: Path, row: dict[str, object]) -> None:
    """The row in the file's ``rows``, by cluster and iteration; of what it has not measured the file keeps its own."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    rows = {(known["cluster"], known["iteration"]): known for known in kept["rows"]}
    place = (row["cluster"], row["iteration"])
    rows[place] = rows.get(place, {}) | row
    kept["rows"] = [rows[place] for place in sorted(rows, key=str)]
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def slower(rows: list[dict[str, object]], pipelines: list[str]) -> list[str]:
    """Where the default is slower than another pipeline, in words."""
    said = []
    for row in rows:
        ours = milliseconds(row, "default")
        for name in set(pipelines) - {ALONE}:
            theirs = milliseconds(row, name)
            if ours is not None and theirs is not None and ours > theirs * (1 + SAME):
                said.append(f"{row['cluster']} iteration {row['iteration']}: {name} is {ours / theirs - 1:.1%} faster")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--clusters", default=CLUSTERS)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--pipelines", help="names separated by semicolons; default: all")
    parser.add_argument("--iterations", help="numbers separated by commas; default: all of the manifest")
    parser.add_argument("--json", type=Path, help="write every figure there, beside those that are not measured again")
    options = parser.parse_args()
    pipelines = options.pipelines.split(";") if options.pipelines else [p for p in NAMED if p not in NOT_COMPARED]
    clusters = options.clusters.split(",")
    traced = traced_on(options.model, options.data, clusters[0])
    count = len(read_manifest(options.data, batch=None).iterations)
    iterations = [int(number) for number in options.iterations.split(",")] if options.iterations else [*range(count)]
    print(f"{'cluster':>14} {'iter':>4} {'clips':>5} " + " ".join(f"{name[:10]:>10}" for name in pipelines) + "   (s)")
    measured: list[dict[str, object]] = []
    for cluster in clusters:
        of_cluster: list[dict[str, object]] = []
        for row in rows(traced, cluster, iterations, pipelines):
            of_cluster.append(row)
            measured.append(row)
            if options.json:  # what is known so far, of a run that takes long
                write(options.json, row)
        total = {name: [milliseconds(row, name) for row in of_cluster] for name in pipelines}
        for name, times in total.items():
            if all(t is not None for t in times):
                print(f"  {cluster} {name:20s} {sum(t for t in times if t is not None) / 1e3:10.2f} s in all")
    said = slower(measured, pipelines) if "default" in pipelines else []
    print("\n".join(said) or "the default is nowhere slower")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
