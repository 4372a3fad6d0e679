"""Predicted against measured step time of plans with stages or cells, on gloo ranks of one thread.

    python -m benchmarks.pipelines.prediction [--ranks 2] [--rounds 5] [--mixes equal] [--plans 1f1b] [--json FILE]

A profile is measured in the same processes, in turns with the plans, so that a machine whose speed drifts slows both
alike. Plans are pipelines of several schedules and stages, and cells, on micro-batches of equal and of mixed lengths; a
plan's time is the median over the rounds of its slowest rank, its prediction the simulator's with that profile.
Below each plan stand predicted and measured ms by kind of instruction, a rank's mean, and the processor time of all of
a rank's threads beside what is predicted to be busy: of the two the processor time is what other users of the machine
change least. ``faults`` are thousands of pages that a rank asked the system for in a step; each costs some microseconds
that no prediction has. Plans that hold most have none of them only once the process has grown to what they hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from scipy.stats import kendalltau

from arachnec.backends.simulator import Simulation, simulate
from arachnec.cluster.file import parse_cluster
from arachnec.cost.profile import write_profile
from arachnec.driver import compile as compile_model
from arachnec.driver import plan_iteration, plan_model
from arachnec.executable.folder import write_executable
from arachnec.ir.nodes import Module
from arachnec.launch.local_ranks import launch
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.recost import Recost
from arachnec.profiling.local import Measured, fitted, measuring_at_once
from benchmarks.pipelines.torch_peer import MODEL

WORKER = "benchmarks.pipelines.prediction_rank"
LENGTHS = {
    "equal": (192,) * 8,
    "short": (64,) * 16,
    "mixed": (512, 64, 64, 128, 256, 64, 64, 128, 64, 64),
    "two long": (512, 512, 128, 128, 64, 64, 64, 64),
}
_END = "place,bucket,lower,check"


@dataclass(frozen=True)
class Row:
    """One plan; ms."""

    clips: str
    plan: str
    predicted: float
    measured: float
    every: list[float]
    kinds: dict[str, tuple[float, float]]  # predicted, measured

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def plans(ranks: int) -> dict[str, str]:
    def staged(stages: int, schedule: str, how: str = "") -> str:
        end = f"schedule-pipeline{{schedule={schedule}{how},recompute=false}},lower,check"
        return f"stages{{p={stages}}},partition{{policy=single}},annotate,{end}"

    def dealt(cell: int, policy: str = "single") -> str:
        return f"shard-parameters{{cell={cell}}},partition{{policy={policy}}},annotate,schedule-z3{{budget=0ms}},{_END}"

    pipelines = {
        "1f1b": staged(ranks, "1f1b"),
        "zb-h1": staged(ranks, "zb-h1"),
        "planned": staged(ranks, "planned"),
        "interleaved": staged(2 * ranks, "interleaved-1f1b"),
        f"cells of {ranks}": dealt(ranks),
        f"cells of {ranks}, filled": dealt(ranks, "equal-token"),
    }
    if ranks == 4:
        pipelines |= {"2 stages, 1f1b": staged(2, "1f1b"), "cells of 2": dealt(2)}
    return pipelines


def write_plans(
    folder: Path, ranks: int, mixes: Sequence[str] = tuple(LENGTHS), only: Sequence[str] = ()
) -> list[tuple[str, str, Module]]:
    """An executable for each plan of these mixes, numbered; ``only`` those of some names, where any are given."""
    modules: list[tuple[str, str, Module]] = []
    everything = [length for mix in mixes for length in LENGTHS[mix]]
    (folder / "all.jsonl").write_text(rows(sorted(set(everything))))
    for mix in mixes:
        manifest, first = folder / f"{mix}.jsonl", None
        manifest.write_text(rows(LENGTHS[mix]))
        for plan, passes in plans(ranks).items():
            if only and plan not in only:
                continue
            pipeline = Pipeline.parse(passes)
            first = first or compile_model(MODEL, manifest, f"{ranks}:cpu", passes=pipeline)
            model, _ = plan_model(first.traced, pipeline)
            module, _ = plan_iteration(model, pipeline, 0)
            write_executable(
                folder / f"{len(modules):03d}",
                program=module,
                traced=first.traced,
                model=model,
                pipeline=str(pipeline),
                model_file=first.model_file,
                clips=first.manifest.clips,
            )
            modules.append((mix, plan, module))
    return modules


def rows(lengths: tuple[int, ...] | list[int]) -> str:
    keys = [{"id": n, "frames": s, "height": 16, "width": 16, "text_tokens": 0} for n, s in enumerate(lengths)]
    return "".join(json.dumps(row) + "\n" for row in keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mixes", default=",".join(LENGTHS), help="of clips, by name, a comma between them")
    parser.add_argument("--plans", default="", help="of these names alone, a comma between them")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cluster = parse_cluster(f"{options.ranks}:cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        modules = write_plans(
            folder, options.ranks, options.mixes.split(","), [*filter(None, options.plans.split(","))]
        )
        arguments = [str(folder), str(measuring_at_once(cluster)), str(options.rounds)]
        launch(options.ranks, arguments, lambda _: None, worker=WORKER)
        measured = msgspec.json.decode((folder / "measured.json").read_bytes(), type=Measured)
        times = json.loads((folder / "times.json").read_text())
        kinds = json.loads((folder / "kinds.json").read_text())
        write_profile(fitted(measured, cluster), folder / "profile.json")
        recost = Recost(str(folder / "profile.json"))
        rows = [
            row_of(mix, plan, simulate(recost.run(module)), every, spent)
            for (mix, plan, module), every, spent in zip(modules, times, kinds, strict=True)
        ]
        profile = msgspec.json.decode((folder / "profile.json").read_bytes())
    show(rows, options.ranks)
    if options.json is not None:
        options.json.write_text(json.dumps({"plans": [asdict(row) for row in rows], "profile": profile}, indent=1))


def row_of(mix: str, plan: str, simulation: Simulation, every: list[float], spent: dict[str, float]) -> Row:
    """``spent`` are the measured ms by kind of instruction, a rank's mean."""
    ranks, predicted = len(simulation.busy_ms), dict.fromkeys(spent, 0.0)
    for interval in (interval for lane in simulation.timeline.lanes.values() for interval in lane):
        predicted[interval.op] = predicted.get(interval.op, 0.0) + (interval.end - interval.start) / ranks
    predicted["processor"] = sum(predicted.get(kind, 0.0) for kind in ("forward", "backward", "weight", "norm", "step"))
    kinds = {kind: (predicted[kind], spent[kind]) for kind in spent}
    return Row(mix, plan, simulation.iteration_ms, statistics.median(every), sorted(every), kinds)


def show(rows: list[Row], ranks: int) -> None:
    print(f"{ranks} ranks; ms\n{'clips':10s} {'plan':22s} predicted  measured   error   spread")
    for row in sorted(rows, key=lambda row: row.measured):
        spread = (row.every[-1] - row.every[0]) / row.measured
        print(
            f"{row.clips:10s} {row.plan:22s} {row.predicted:9.1f} {row.measured:9.1f} {row.error:+7.1%} {spread:8.1%}"
        )
        kinds = [f"{kind} {a:.0f}/{b:.0f}" for kind, (a, b) in row.kinds.items() if max(a, b) >= 1.0]
        print(f"{'':12s}{', '.join(kinds)}")
    errors = [abs(row.error) for row in rows]
    tau = kendalltau([row.predicted for row in rows], [row.measured for row in rows]).statistic
    print(
        f"{len(rows)} plans: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, Kendall's tau {tau:.2f}"
    )


if __name__ == "__main__":
    main()
