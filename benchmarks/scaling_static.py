"""How much shorter an iteration is than under the best static layout, from 8 to 1024 GPUs.

    python benchmarks/scaling_static.py --json benchmarks/results/scaling_static.json --svg docs/figures/scaling.svg

What the JSON file holds already is not measured again.

HunyuanVideo on the bucketed video mix, H200 nodes of eight (eight H100 hold no optimizer state of 13 billion
parameters), costs from the device specs, simulated. Strong scaling keeps the clips of an iteration and adds GPUs, weak
scaling adds clips with them. Static layouts are the best single degree for everything, chosen anew for every size; data
parallelism; and groups of fixed unequal sizes, many cuts tried and the best kept (`knapformer`). Micro-batches are the
same for all. Medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ablations import COSTED, simulated
from traced_stages import module_of, video_mix

from arachnec.ir.diagnostic import UserError
from arachnec.passes.infra.pipeline import Pipeline

MODEL = "hunyuanvideo"
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
STRONG = 128  # clips
WEAK = 2  # clips a GPU
LAYOUTS = {
    "default": "schedule-z3{{budget={budget}ms}}",
    "best single degree": "schedule-static",
    "data parallelism": "schedule-static{{policy=data-parallel}}",
    "fixed unequal groups": "schedule-knapformer",
}
COLOURS = {"best single degree": "#0072b2", "fixed unequal groups": "#009e73", "data parallelism": "#d55e00"}


def measured(kind: str, gpus: int, clips: int, seed: int, budget: int) -> dict[str, Any]:
    """ms of one iteration under every layout; None where one cannot hold a clip."""
    costed = Pipeline.parse(COSTED).run(module_of(MODEL, video_mix(clips, seed), f"{gpus // 8}x8:h200-141g"))
    row: dict[str, Any] = {"scaling": kind, "gpus": gpus, "clips": clips, "seed": seed}
    for name, passes in LAYOUTS.items():
        started = time.perf_counter()
        try:
            placed = Pipeline.parse(passes.format(budget=budget) + ",place").run(costed)
        except UserError:
            row[name] = None
            continue
        row[f"planning of {name}"] = round((time.perf_counter() - started) * 1e3)
        row[name] = round(simulated(placed), 3)
    return row


def advantage(rows: Iterable[dict[str, Any]], layout: str) -> float:
    """The median part of a layout's time that the default saves."""
    return statistics.median(1 - row["default"] / row[layout] for row in rows if row[layout])


def points(rows: Sequence[dict[str, Any]], kind: str) -> dict[int, list[dict[str, Any]]]:
    """The rows of one kind by the number of GPUs."""
    curves: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row["scaling"] == kind:
            curves.setdefault(row["gpus"], []).append(row)
    return dict(sorted(curves.items()))


def draw(rows: Sequence[dict[str, Any]], place: Path) -> None:
    """Saved time over GPUs, strong and weak scaling beside each other."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "scaling", "font.size": 9})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("strong", "weak"), strict=True):
        curve = points(rows, kind)
        for layout, colour in COLOURS.items():
            saved = [100 * advantage(of_size, layout) for of_size in curve.values()]
            axis.plot(list(curve), saved, marker="o", color=colour, label=layout)
        clips = {
            row["clips"] / row["gpus"] if kind == "weak" else row["clips"] for row in rows if row["scaling"] == kind
        }
        what = f"{min(clips):g} clips a GPU" if kind == "weak" else f"{min(clips):g} clips"
        axis.set(title=f"{kind} scaling: {what}", xlabel="GPUs", xscale="log", ylim=(-5, 100))
        axis.set_xticks(list(curve), [str(gpus) for gpus in curve])
        axis.minorticks_off()
        axis.grid(color="#d0d7de", linewidth=0.6)
    axes[0].set_ylabel("iteration time saved, %")
    axes[1].legend(title="compared with", frameon=False, loc="center right")
    figure.savefig(place, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default=",".join(map(str, GPUS)))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, default=2000, help="ms of the default's search")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.json.read_text()) if options.json and options.json.is_file() else []
    known = {(row["scaling"], row["gpus"], row["seed"]) for row in rows}
    print(f"{'':8}{'GPUs':>5}{'clips':>6}" + "".join(f"{name:>22}" for name in LAYOUTS) + "   s, and what is saved")
    for kind in ("strong", "weak"):
        for gpus in map(int, options.gpus.split(",")):
            clips = STRONG if kind == "strong" else WEAK * gpus
            for seed in range(options.seeds):
                if (kind, gpus, seed) not in known:
                    rows.append(measured(kind, gpus, clips, seed, options.budget))
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            here = points(rows, kind)[gpus]
            cells = [f"{statistics.median(row['default'] for row in here) / 1e3:>22.3f}"]
            for name in list(LAYOUTS)[1:]:
                times = [row[name] for row in here if row[name]]
                saved = f"{statistics.median(times) / 1e3:.3f} ({advantage(here, name):.0%})" if times else "-"
                cells.append(f"{saved:>22}")
            print(f"{kind:8}{gpus:5}{clips:6}" + "".join(cells), flush=True)
    if options.svg:
        draw(rows, options.svg)


if __name__ == "__main__":
    main()
