"""Every named pipeline, compiled and trained for real on gloo ranks of this machine: measured beside predicted.

    python benchmarks/baselines_on_gloo.py [--ranks 4] [--steps 6] [--rounds 1] [--pipelines default,flexsp]

The demo's model with its video and text encoders, its clips, and one long clip that only sharing keeps from being the
whole step. The machine is profiled first; then every pipeline runs as a person would run it, in turn, `rounds` times.
Measured is the median step without each run's first and last. The last one's clips are encoded by the step before, and
it encodes none ahead. Predicted is what the simulator says of the program. Losses must agree with the first pipeline's
at every step: a plan may change the speed only. `tests/distributed/launch/machines/test_baselines_on_ranks.py` holds
gradients against one process. Ends with 1 where losses do not agree. Takes a quarter of a minute for each pipeline and
round, and two minutes before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from step_time import DEMO, arachnec

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.data.manifest import read_manifest
from arachnec.driver import front_end, plan_iteration, plan_model, trace_file
from arachnec.executable.folder import write_executable
from arachnec.models.file import load_model_file
from arachnec.passes.annotate import Annotate
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.passes.infra.pipeline import Pipeline

LONG = {"start": 0, "frames": 97, "height": 96, "width": 160}
SAME_LOSS = 1e-4  # relative, after some steps of an optimizer that divides by small numbers


def write_clips(place: Path) -> None:
    """The demo's manifest and the long clip."""
    subprocess.run([sys.executable, DEMO / "make_clips.py", place], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in place.read_text().splitlines()]
    rabbit = next(row for row in rows if "rabbit" in row["caption"])
    place.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rabbit | LONG]), encoding="utf-8")


def compile_all(names: list[str], clips: Path, cluster: str, profile: Path, folder: Path) -> dict[str, float]:
    """An executable in ``folder`` for every pipeline; the model is traced once. Predicted ms of each."""
    model_file, manifest = load_model_file(DEMO / "model.py"), read_manifest(clips)
    traced = front_end(trace_file(model_file, manifest), manifest, parse_cluster(cluster))
    predicted = {}
    for name in names:
        named = Pipeline.parse(PIPELINES[name])
        pipeline = Pipeline(
            tuple(replace(p, profile=str(profile)) if isinstance(p, Annotate) else p for p in named.passes)
        )
        model, _ = plan_model(traced, pipeline)
        program, _ = plan_iteration(model, pipeline, 0)
        predicted[name] = simulate(program).iteration_ms
        write_executable(
            folder / name,
            program=program,
            traced=traced,
            model=model,
            pipeline=str(pipeline),
            model_file=model_file,
            clips=manifest.clips,
        )
    return predicted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="at least three")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pipelines", default=",".join(PIPELINES))
    options = parser.parse_args()
    if options.steps < 3:
        parser.error("--steps: at least three, for the first and the last do not count")
    names, cluster = options.pipelines.split(","), f"{options.ranks}:cpu"
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        clips, profile = folder / "clips.jsonl", folder / "profile.json"
        write_clips(clips)
        arachnec("profile", DEMO / "model.py", "--data", clips, "--cluster", cluster, "-o", profile)
        predicted = compile_all(names, clips, cluster, profile, folder)
        for _ in range(options.rounds):
            for name in names:
                report = folder / f"{name}.json"
                arachnec("run", folder / name, "--steps", str(options.steps), "--report", report)
                steps = json.loads(report.read_text())["steps"]
                times[name] += [step["step_ms"] for step in steps[1:-1]]
                losses[name] = [step["loss"] for step in steps]
                print(f"ran {name}", file=sys.stderr, flush=True)
    print(f"{'pipeline':20} {'measured':>10} {'least':>8} {'most':>8} {'predicted':>10} {'error':>7}   ms, losses")
    for name in sorted(names, key=lambda name: statistics.median(times[name])):
        middle = statistics.median(times[name])
        off = differ(losses[name], losses[names[0]])
        print(
            f"{name:20} {middle:10.0f} {min(times[name]):8.0f} {max(times[name]):8.0f} {predicted[name]:10.0f} "
            f"{predicted[name] / middle - 1:7.1%}   {'as ' + names[0] if off <= SAME_LOSS else f'OFF BY {off:.1e}'}"
        )
    return int(any(differ(losses[name], losses[names[0]]) > SAME_LOSS for name in names))


def differ(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two rows of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
