"""Predicted against measured iteration time of many different plans on gloo ranks of this machine.

    python benchmarks/prediction_accuracy.py [--ranks 2] [--rounds 9] [--output benchmarks/results]

A profile is measured in the same processes, in turns with the plans, so that a machine whose speed drifts slows both
alike. Plans are real programs of the named pipelines and of hand-picked degrees and orders, on several mixes of clips,
run by the executor; a plan's time is the median over the rounds of its slowest rank. With more ranks than cores
the ranks share them. Prints every plan and how good the predictions are; writes the data and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from same_program import shape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arachnec.backends.simulator import simulate  # noqa: E402
from arachnec.cluster.file import parse_cluster  # noqa: E402
from arachnec.cost.profile import write_profile  # noqa: E402
from arachnec.driver import trace  # noqa: E402
from arachnec.executable.folder import iteration_of  # noqa: E402
from arachnec.ir.diagnostic import UserError  # noqa: E402
from arachnec.ir.nodes import Cluster, Module  # noqa: E402
from arachnec.ir.printer import print_module  # noqa: E402
from arachnec.launch.local_ranks import launch  # noqa: E402
from arachnec.passes.check import checked  # noqa: E402
from arachnec.passes.infra.named_pipelines import PIPELINES  # noqa: E402
from arachnec.passes.infra.pipeline import Pipeline  # noqa: E402
from arachnec.passes.recost import Recost  # noqa: E402
from arachnec.profiling.local import Measured, fitted, measuring_at_once  # noqa: E402

MODEL = ROOT / "benchmarks" / "models" / "prediction_model.py"
WORKER = "benchmarks.models.prediction_worker"

# frames, height, width, caption tokens, how many
MIXES = {
    "one long, many short": [(81, 96, 160, 96, 1), (17, 64, 112, 64, 2), (1, 96, 160, 20, 4), (5, 64, 64, 32, 3)],
    "middle": [(33, 64, 112, 120, 2), (17, 112, 64, 24, 3), (9, 96, 96, 16, 2), (1, 160, 96, 48, 2)],
    "long": [(81, 96, 160, 96, 1), (49, 96, 160, 40, 1), (33, 64, 112, 120, 1)],
    "short": [(1, 64, 64, 12, 4), (1, 96, 160, 20, 5), (5, 64, 64, 32, 6), (9, 96, 96, 16, 3)],
}
_END = "place,lower,check"
BY_HAND = {
    "degree 1": f"partition{{policy=single}},annotate,schedule-static{{policy=one-degree,degree=1}},{_END}",
    "degree 2": f"partition{{policy=single}},annotate,schedule-static{{policy=one-degree,degree=2}},{_END}",
    "dealt out": f"partition{{policy=single}},annotate,schedule-static{{policy=data-parallel}},{_END}",
    "in buckets": "partition,annotate,schedule-z3{budget=0ms},place,bucket,lower,check",
}
TRIED = ("default", "data-parallel", "equal-token", "ulysses", "same-bucket", "flexsp", "knapformer", "arachne-ga")


@dataclass(frozen=True)
class Row:
    """One plan; ms."""

    mix: str
    pipelines: list[str]  # that made it
    cascades: int
    degrees: list[int]
    predicted: float
    measured: float
    every: list[float]  # round by round

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def manifest() -> str:
    """One iteration for each mix."""
    keys = ("frames", "height", "width", "text_tokens", "clips")
    rows = [
        {**dict(zip(keys, clip, strict=True)), "iteration": number}
        for number, mix in enumerate(MIXES.values())
        for clip in mix
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def plans(traced: Module) -> Iterator[tuple[str, list[str], Module]]:
    """For each mix the different programs that the pipelines make of it, with the names of those that made them."""
    for number, mix in enumerate(MIXES):
        candidates: dict[str, tuple[list[str], Module]] = {}
        for name in (*TRIED, *BY_HAND):
            try:
                text = PIPELINES.get(name) or BY_HAND[name]
                module = Pipeline.parse(text).run(iteration_of(traced, number))
            except UserError as error:
                print(f"{mix}: {name} makes no plan: {error}", file=sys.stderr)
                continue
            candidates.setdefault(shape(module), ([], module))[0].append(name)
        for names, module in candidates.values():
            yield mix, names, module


def measure(folder: Path, cluster: Cluster, rounds: int) -> tuple[Measured, list[list[float]]]:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    arguments = [str(folder), str(measuring_at_once(cluster)), str(rounds)]
    launch(cluster.world, arguments, lambda line: None, worker=WORKER)
    measured = msgspec.json.decode((folder / "measured.json").read_bytes(), type=Measured)
    return measured, json.loads((folder / "times.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    started = time.perf_counter()
    cluster = parse_cluster(f"{options.ranks}:cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clips = folder / "clips.jsonl"
        clips.write_text(manifest())
        traced = trace(MODEL, clips, f"{options.ranks}:cpu")
        candidates = list(plans(traced))
        for number, (_, _, module) in enumerate(candidates):
            (folder / f"{number:03d}.cascade").write_text(print_module(checked(module)))
        print(f"{len(candidates)} plans, {time.perf_counter() - started:.0f} s", file=sys.stderr)
        measured, times = measure(folder, cluster, options.rounds)
        profile = fitted(measured, cluster)
        write_profile(profile, folder / "profile.json")
        rows = [
            predicted(mix, names, module, every, folder / "profile.json")
            for (mix, names, module), every in zip(candidates, times, strict=True)
        ]
    report = summary(rows) | {"ranks": options.ranks, "rounds": options.rounds, "machine": profile.machine}
    show(rows, report)
    options.output.mkdir(parents=True, exist_ok=True)
    place = options.output / f"prediction_accuracy_{options.ranks}_ranks.json"
    content = report | {"plans": [asdict(row) for row in rows], "profile": msgspec.to_builtins(profile)}
    place.write_text(json.dumps(content, indent=1) + "\n")
    plot(rows, report, place.with_suffix(".svg"))
    print(f"wrote {place} and {place.with_suffix('.svg')}, {time.perf_counter() - started:.0f} s")


def predicted(mix: str, names: list[str], module: Module, every: list[float], profile: Path) -> Row:
    simulation = simulate(Recost(str(profile)).run(module))
    degrees = sorted({cascade.degree for cascade in module.cascades})
    return Row(
        mix, names, len(module.cascades), degrees, simulation.iteration_ms, statistics.median(every), sorted(every)
    )


def summary(rows: list[Row]) -> dict[str, float]:
    from scipy.stats import kendalltau

    errors = [abs(row.error) for row in rows]
    tau = kendalltau([row.predicted for row in rows], [row.measured for row in rows]).statistic
    return {"mean_error": statistics.mean(errors), "worst_error": max(errors), "kendall_tau": float(tau)}


def show(rows: list[Row], report: dict[str, float]) -> None:
    print(f"{'clips':22s} {'plan':34s} cascades degrees predicted  measured   error   spread")
    for row in sorted(rows, key=lambda row: row.measured):
        plan = ", ".join(row.pipelines)
        plan = plan if len(plan) < 34 else plan[:31] + "..."
        degrees = ",".join(map(str, row.degrees))
        spread = (row.every[-1] - row.every[0]) / row.measured
        print(
            f"{row.mix:22s} {plan:34s} {row.cascades:8d} {degrees:>7s} {row.predicted:9.1f} {row.measured:9.1f} "
            f"{row.error:+7.1%} {spread:8.1%}"
        )
    print(
        f"{len(rows)} plans: mean error {report['mean_error']:.1%}, worst {report['worst_error']:.1%}, "
        f"Kendall tau {report['kendall_tau']:.3f}"
    )


def plot(rows: list[Row], report: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 5))
    top = 1.1 * max(max(row.predicted, row.measured) for row in rows)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="0.92", label="within 10 %")
    axes.plot([0, top], [0, top], color="0.6", linewidth=1)
    for mix in dict.fromkeys(row.mix for row in rows):
        own = [row for row in rows if row.mix == mix]
        axes.plot([row.measured for row in own], [row.predicted for row in own], "o", markersize=4, label=mix)
    axes.set(xlim=(0, top), ylim=(0, top), xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_title(
        f"{len(rows)} plans on {report['ranks']} gloo ranks: mean error {report['mean_error']:.1%}, "
        f"worst {report['worst_error']:.1%}, tau {report['kendall_tau']:.2f}",
        fontsize=9,
    )
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
