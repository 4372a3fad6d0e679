"""What the default chooses among layouts, and what every alternative takes that is forced by hand.

The rows of the table of models, clips and clusters: equal clips of Wan2.1-14B and HunyuanVideo (stages as traced,
``benchmarks/data``) on clusters of H100 and L20. Of every kind of layout (``arachnec.planning.layouts``) the shortest
iteration in s, simulated, or what it takes at least, longer than another's; "-" where a clip fits in none; then
what the default takes, and the processor time of planning. ``--forced`` simulates every layout::

    python -m benchmarks.sharded.default_choice --steps 100 --json benchmarks/results/default_choice.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip, Cluster, Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Quantity
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.layouts import REPLICATED, layouts
from arachnec.report import alternatives

DATA = Path(__file__).parents[1] / "data"
WAN, HUNYUAN = "wan2_1_14b", "hunyuanvideo"
SHORT, MEDIUM, LONG = (17, 256, 256, 1280), (81, 480, 832, 32760), (81, 720, 1280, 75600)
SLOW = 3.0  # GB/s between nodes
ROWS = (
    (WAN, "8x8:h100-80g", None, 512, SHORT),
    (WAN, "8x8:h100-80g", None, 64, MEDIUM),
    (WAN, "8x8:h100-80g", None, 64, LONG),
    (WAN, "2x8:h100-80g", None, 64, MEDIUM),
    (WAN, "1x8:h100-80g", None, 64, MEDIUM),
    (WAN, "8x8:h100-80g", SLOW, 512, SHORT),
    (WAN, "8x8:h100-80g", SLOW, 64, MEDIUM),
    (WAN, "8x1:h100-80g", SLOW, 512, SHORT),
    (WAN, "8x1:h100-80g", SLOW, 64, MEDIUM),
    (WAN, "2x8:l20", None, 512, SHORT),
    (WAN, "8x8:l20", None, 512, SHORT),
    (WAN, "2x8:l20", None, 64, MEDIUM),
    (WAN, "8x8:l20", None, 64, MEDIUM),
    (HUNYUAN, "8x8:h100-80g", None, 64, MEDIUM),
    (HUNYUAN, "1x8:h100-80g", None, 64, MEDIUM),
    (HUNYUAN, "2x8:l20", None, 64, MEDIUM),
)


def cluster_of(text: str, inter: float | None) -> Cluster:
    cluster = parse_cluster(text)
    if inter is None:
        return cluster
    return replace(cluster, attrs=cluster.attrs.updated(inter=Quantity(inter, "GB/s")))


def module_of(model: str, cluster: str, inter: float | None, count: int, shape: tuple[int, int, int, int]) -> Module:
    source = parse_module((DATA / f"{model}.cascade").read_text(encoding="utf-8"), model)
    frames, height, width, tokens = shape
    clips = tuple(
        Clip(number, frames, height, width, 512, tokens, Attributes.of(iteration=0)) for number in range(count)
    )
    return Module(model, Level.TRACED, cluster_of(cluster, inter), clips, source.stages)


def planned(module: Module, layout: str | None, steps: int) -> tuple[Module | None, float]:
    """The plan, in a layout or the one chosen, and the s of processor time that it took; None where nothing fits."""
    chosen = "choose-layout" if layout is None else f"choose-layout{{layout={layout}}}"
    passes = Pipeline.parse(f"{chosen},partition,annotate,schedule-z3{{steps={steps}}},place,bucket,lower,check")
    started = time.process_time()
    try:
        lowered = passes.run(module)
    except UserError:
        return None, time.process_time() - started
    return lowered, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of the scheduler")
    parser.add_argument("--rows", default="", help="numbers of rows, such as 1,4; all without")
    parser.add_argument("--forced", action="store_true", help="plan every layout by hand, those that are excluded too")
    parser.add_argument("--json", type=Path, help="put the rows into this file")
    options = parser.parse_args()
    numbers = [int(number) for number in options.rows.split(",")] if options.rows else range(len(ROWS))
    print("| model, cluster, clips | replicated | cells | stages | default | over the best | planning, s |")
    print("|---|---|---|---|---|---|---|")
    for number in numbers:
        rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else {}
        row = rows[str(number)] = measured(number, options.steps, rows.get(str(number)) if options.forced else None)
        for _ in forced(number, options.steps, row) if options.forced else ():
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(text(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measured(number: int, steps: int, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """s of every layout that the default looked at, simulated or at least; and those forced in a call before."""
    module = module_of(*ROWS[number])
    model, cluster, inter, count, shape = ROWS[number]
    links = f" at {inter:g} GB/s" if inter else ""
    default, taken = planned(module, None, steps)
    rows = [] if default is None else alternatives(default)
    simulated = {row["layout"]: row["simulated_ms"] / 1e3 for row in rows if row["simulated_ms"] is not None}
    at_least = {row["layout"]: row["at_least_ms"] / 1e3 for row in rows if row["at_least_ms"] is not None}
    return {
        "row": f"{model}, {cluster}{links}, {count} x {'x'.join(map(str, shape[:3]))}",
        "simulated_s": simulated,
        "at_least_s": at_least,
        "default_s": None if default is None else simulate(default).iteration_ms / 1e3,
        "layout": None if default is None else default.attrs.get("layout", REPLICATED),
        "planning_cpu_s": taken,
        "forced_s": {} if before is None else before.get("forced_s", {}),
    }


def forced(number: int, steps: int, row: dict[str, Any]) -> Iterator[None]:
    """Every layout of the row planned by hand into its ``forced_s``, None where a clip does not fit; the one that takes
    least at least comes first, and those that a call before has done are left."""
    module = module_of(*ROWS[number])
    least = row["at_least_s"] | row["simulated_s"]
    for layout in sorted(layouts(module), key=lambda layout: least.get(layout.name, math.inf)):
        if layout.name not in row["forced_s"]:
            plan, _ = planned(module, layout.name, steps)
            row["forced_s"][layout.name] = None if plan is None else simulate(plan).iteration_ms / 1e3
        if row["forced_s"][layout.name] is not None:
            row["simulated_s"][layout.name] = row["forced_s"][layout.name]
            row["at_least_s"].pop(layout.name, None)
        yield


def text(row: dict[str, Any]) -> str:
    """The row as Markdown: of each kind the shortest, simulated or at least."""
    default, simulated, at_least = row["default_s"], row["simulated_s"], row["at_least_s"]

    def best(kind: str) -> str:
        times = {name: time for name, time in simulated.items() if name.startswith(kind)}
        mark = "" if times else ">= "
        times = times or {name: time for name, time in at_least.items() if name.startswith(kind)}
        name = min(times, key=lambda name: times[name], default=None)
        if name is None:
            return "-"
        own = name.removeprefix(kind).strip("-")
        return f"{own}: {mark}{times[name]:.2f}" if own else f"{mark}{times[name]:.2f}"

    over = "-" if default is None or not simulated else f"{default / min(simulated.values()) - 1:+.1%}"
    took = "refused" if default is None else f"{default:.2f} ({row['layout']})"
    cells = " | ".join(best(kind) for kind in (REPLICATED, "cells", "stages"))
    return f"| {row['row']} | {cells} | {took} | {over} | {row['planning_cpu_s']:.1f} |"


if __name__ == "__main__":
    main()
