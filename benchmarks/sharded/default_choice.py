"""What the default chooses between parameters on every rank and in cells, and what the alternatives take by hand.

Equal clips of Wan2.1-14B and HunyuanVideo (stages as traced, ``benchmarks/data``) on clusters of H100 and L20. Each row
plans the same clips with ``shard-optimizer`` alone, with ``shard-parameters`` at each size of cell, and with the
default, and simulates the iteration, in s; "-" where a clip fits nowhere::

    python benchmarks/sharded/default_choice.py --steps 300
"""

from __future__ import annotations

import argparse
from pathlib import Path

from arachnec.backends.simulator import simulate
from arachnec.cluster.file import parse_cluster
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip, Level, Module
from arachnec.ir.parser import parse_module
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.sharding_choice import cell_sizes

DATA = Path(__file__).parents[1] / "data"
WAN, HUNYUAN = "wan2_1_14b", "hunyuanvideo"
SHORT, MEDIUM, LONG = (17, 256, 256, 1280), (81, 480, 832, 32760), (81, 720, 1280, 75600)
ROWS = (
    (WAN, "8x8:h100-80g", 512, SHORT),
    (WAN, "8x8:h100-80g", 64, MEDIUM),
    (WAN, "8x8:h100-80g", 64, LONG),
    (WAN, "2x8:h100-80g", 64, MEDIUM),
    (WAN, "1x8:h100-80g", 64, MEDIUM),
    (WAN, "2x8:l20", 64, MEDIUM),
    (HUNYUAN, "8x8:h100-80g", 64, MEDIUM),
    (HUNYUAN, "1x8:h100-80g", 64, MEDIUM),
)


def module_of(model: str, cluster: str, count: int, shape: tuple[int, int, int, int]) -> Module:
    source = parse_module((DATA / f"{model}.cascade").read_text(encoding="utf-8"), model)
    frames, height, width, tokens = shape
    clips = tuple(Clip(number, frames, height, width, 512, tokens) for number in range(count))
    return Module(model, Level.TRACED, parse_cluster(cluster), clips, source.stages)


def seconds(module: Module, first: str, steps: int) -> tuple[float | None, int]:
    """The simulated iteration, and the cell it was planned with."""
    passes = f"{first},partition,annotate,schedule-z3{{steps={steps}}},place,bucket,lower,check"
    try:
        planned = Pipeline.parse(passes).run(module)
    except UserError:
        return None, 0
    cell = next((stage.attrs["cell"] for stage in planned.stages if "cell" in stage.attrs), 1)
    assert isinstance(cell, int)
    return simulate(planned).iteration_ms / 1e3, cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of the scheduler")
    parser.add_argument("--rows", default="", help="numbers of rows, such as 1,4; all without")
    options = parser.parse_args()
    chosen = [int(number) for number in options.rows.split(",")] if options.rows else range(len(ROWS))
    print("| model, cluster, clips | replicated | cells of: s | default | over the best |")
    print("|---|---|---|---|---|")
    for number in chosen:
        model, cluster, count, shape = ROWS[number]
        module = module_of(model, cluster, count, shape)
        assert module.cluster is not None
        replicated, _ = seconds(module, "shard-optimizer", options.steps)
        cells = {
            size: seconds(module, f"shard-parameters{{cell={size}}},shard-optimizer", options.steps)[0]
            for size in cell_sizes(module.cluster)
        }
        default, cell = seconds(module, "shard-parameters{cell=auto},shard-optimizer", options.steps)
        listed = ", ".join(f"{size}: {_text(time)}" for size, time in cells.items())
        best = min((time for time in (replicated, *cells.values()) if time is not None), default=None)
        over = "-" if best is None or default is None else f"{default / best - 1:.1%}"
        what = f"{model}, {cluster}, {count} x {'x'.join(map(str, shape[:3]))}"
        print(f"| {what} | {_text(replicated)} | {listed} | {_text(default)} (cell {cell}) | {over} |", flush=True)


def _text(time: float | None) -> str:
    return "-" if time is None else f"{time:.2f}"


if __name__ == "__main__":
    main()
