"""What the default chooses among layouts, and what every alternative takes that is forced by hand.

The rows of the table of models, clips and clusters: equal clips of Wan2.1-14B and HunyuanVideo (stages as traced,
``benchmarks/data``) on clusters of H100 and L20. Every layout (``arachnec.planning.layouts``) plans the same clips and
is simulated, in s; "-" where a clip fits nowhere; then what the default takes, and how long its choice takes::

    python -m benchmarks.sharded.default_choice --steps 100 --json benchmarks/results/default_choice.json
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip, Cluster, Level, Module
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Quantity
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.layouts import layouts

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


def planned(module: Module, layout: str | None, steps: int) -> tuple[float | None, str, float]:
    """The simulated iteration in s, the layout it was planned in, and the s of processor time that planning took."""
    chosen = "choose-layout" if layout is None else f"choose-layout{{layout={layout}}}"
    passes = Pipeline.parse(f"{chosen},partition,annotate,schedule-z3{{steps={steps}}},place,bucket,lower,check")
    started = time.process_time()
    try:
        lowered = passes.run(module)
    except UserError:
        return None, "", time.process_time() - started
    taken = time.process_time() - started
    return simulate(lowered).iteration_ms / 1e3, str(lowered.attrs.get("layout", "replicated")), taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of the scheduler")
    parser.add_argument("--rows", default="", help="numbers of rows, such as 1,4; all without")
    parser.add_argument("--only-default", action="store_true", help="force no alternative")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    options = parser.parse_args()
    numbers = [int(number) for number in options.rows.split(",")] if options.rows else range(len(ROWS))
    print("| model, cluster, clips | replicated | best cells | best stages | default | over the best | planning, s |")
    print("|---|---|---|---|---|---|---|")
    for number in numbers:
        row = measured(number, options.steps, forced=not options.only_default)
        print(text(row), flush=True)
        if options.json:
            rows = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
            rows[str(number)] = row
            options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measured(number: int, steps: int, *, forced: bool) -> dict[str, object]:
    model, cluster, inter, count, shape = ROWS[number]
    module = module_of(model, cluster, inter, count, shape)
    links = f" at {inter:g} GB/s" if inter else ""
    names = [layout.name for layout in layouts(module)] if forced else []
    times = {name: planned(module, name, steps)[0] for name in names}
    default, layout, seconds = planned(module, None, steps)
    return {
        "row": f"{model}, {cluster}{links}, {count} x {'x'.join(map(str, shape[:3]))}",
        "forced_s": times,
        "default_s": default,
        "layout": layout,
        "planning_cpu_s": seconds,
    }


def text(row: dict[str, object]) -> str:
    times = row["forced_s"]
    assert isinstance(times, dict)
    default = row["default_s"]
    fits = {name: time for name, time in times.items() if time is not None}

    def best(kind: str) -> str:
        among = {name: time for name, time in fits.items() if name.startswith(kind)}
        name = min(among, key=lambda name: among[name], default=None)
        return "-" if name is None else f"{name.removeprefix(kind).strip('-')}: {among[name]:.2f}".removeprefix(": ")

    least = min(fits.values(), default=None)
    over = "-" if least is None or not isinstance(default, float) else f"{default / least - 1:+.1%}"
    took = f"{default:.2f} ({row['layout']})" if isinstance(default, float) else "refused"
    cells = " | ".join(best(kind) for kind in ("replicated", "cells", "stages"))
    return f"| {row['row']} | {cells} | {took} | {over} | {row['planning_cpu_s']:.1f} |"


if __name__ == "__main__":
    main()
