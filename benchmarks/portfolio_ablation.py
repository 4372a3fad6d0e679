"""What every improver of the scheduler's portfolio is worth: switched off alone, on the same problems and effort.

    python benchmarks/portfolio_ablation.py [--steps 500] [--problems tables,placed] [--without annealing] [--json FILE]

Problems are those of ``plan_tables.py`` (chains with measured durations), of ``plan_video_mix.py`` (clips that wait for
nothing), and modules of ``ablations.py`` whose plans are placed and simulated. Effort is counted in steps, so that the
answer is the same on any machine. One row for each improver: how many plans are longer, shorter or no more proved
without it, and by how much their mean length changes. The row of another seed says which changes are chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ablations import costed, long_clips
from plan_tables import table
from plan_video_mix import instance
from traced_stages import video_mix

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.planning.duration_table import read_table
from arachnec.planning.following import Following
from arachnec.planning.formulate import problem_of
from arachnec.planning.placed_search import Measure, solve_placed
from arachnec.solver.budget import Clock
from arachnec.solver.problem import TICKS, Problem
from arachnec.solver.search import solve

IMPROVERS = (
    "annealing",
    "z3 gap search",
    "large neighbourhoods",
    "placed search",
)
Row = dict[str, Any]
SIZES = ((16, 8), (64, 32), (32, 32), (128, 64), (512, 256))
ANOTHER = "another seed"

Plan = Callable[[int, int, tuple[str, ...]], tuple[float, bool]]  # steps, seed, without: gap, proved


def tables(cases: int) -> list[Plan]:
    plans = []
    for case in range(cases):
        _, cluster, tasks = table(case)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "table.json"
            file.write_text(json.dumps({"unit": "ms", "tasks": tasks}))
            module = read_table(file, parse_cluster(cluster)).module
        plans.append(counted(problem_of(module, CostModel(module))))
    return plans


def mixes() -> list[Plan]:
    seeds = [(*size, seed) for size in SIZES for seed in (0, 1)]
    return [counted(instance(clips, gpus, seed, wide=wide)) for clips, gpus, seed in seeds for wide in (False, True)]


def modules() -> list[Plan]:
    return [
        placed(costed("hunyuanvideo", long_clips(9), "8x8:h100-80g")),
        placed(costed("hunyuanvideo", long_clips(24), "4x8:h100-80g")),
        placed(costed("hunyuanvideo", long_clips(48), "8x8:h100-80g")),
        placed(costed("wan2_1_1_3b_vae", video_mix(12, 3), "benchmarks/data/h100x8_ethernet.toml")),
        placed(costed("wan2_1_1_3b_vae", video_mix(32, 0), "2x8:h100-80g")),
        placed(costed("hunyuanvideo", video_mix(128, 0), "8x8:h100-80g")),
        placed(costed("wan2_1_1_3b_vae", video_mix(32, 1), "4:h100-80g+4:a100-80g")),
        placed(costed("hunyuanvideo", video_mix(64, 1), "2x8:h100-80g+2x8:h20")),
    ]


def counted(problem: Problem) -> Plan:
    """Plans of GPUs that are interchangeable, judged by their makespan."""

    def plan(steps: int, seed: int, without: tuple[str, ...]) -> tuple[float, bool]:
        answer = solve(problem, Clock(0.0, 0.0, steps=steps), seed, without)
        return answer.schedule.makespan(problem) / answer.area_bound - 1, answer.proved

    return plan


def placed(module: Module) -> Plan:
    """Plans on a cluster, judged by their simulated iteration."""
    cost, following = CostModel(module), Following()
    problem = problem_of(module, cost)
    measure = Measure(module, cost, problem, following)

    def plan(steps: int, seed: int, without: tuple[str, ...]) -> tuple[float, bool]:
        clock = Clock(0.0, 0.0, steps=steps)
        answer = solve_placed(
            module, cost, problem, clock, seed=seed, following=following, baselines=True, without=without
        )
        return measure.simulated(answer.schedule) / (answer.area_bound / TICKS + measure.sync.least) - 1, answer.proved

    return plan


def row(name: str, improver: str, whole: Sequence[tuple[float, bool]], rest: Sequence[tuple[float, bool]]) -> Row:
    """What is known of the plans without one improver; changes are of length, relative to those by all."""
    changes = [(1 + less[0]) / (1 + more[0]) - 1 for less, more in zip(rest, whole, strict=True)]
    return {
        "problems": name,
        "without": improver,
        "mean_gap": statistics.mean(gap for gap, _ in rest),
        "change": statistics.mean(changes),
        "longer": sum(change > 0 for change in changes),
        "shorter": sum(change < 0 for change in changes),
        "proofs": sum(proved for _, proved in rest),
        "gaps": [round(gap, 6) for gap, _ in rest],
    }


def line(row: Row) -> str:
    cells = (f"{row['mean_gap']:.3%}", f"{row['change']:+.3%}", row["longer"], row["shorter"], row["proofs"])
    return f"| {row['problems']} | {row['without']} | " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--problems", default="tables,mixes,placed")
    parser.add_argument("--without", default=";".join(IMPROVERS), help="names separated by semicolons")
    parser.add_argument("--json", type=Path, help="write every gap there")
    options = parser.parse_args()
    groups = {"tables": lambda: tables(options.cases), "mixes": mixes, "placed": modules}
    rows = []
    print("| problems | without | mean gap | change of length | longer | shorter | proofs |")
    print("|---|---|---|---|---|---|---|")
    for name in options.problems.split(","):
        plans = groups[name]()
        whole = [plan(options.steps, 0, ()) for plan in plans]
        for improver in ("nothing", ANOTHER, *options.without.split(";")):
            seed, without = int(improver == ANOTHER), () if improver in ("nothing", ANOTHER) else (improver,)
            rest = whole if improver == "nothing" else [plan(options.steps, seed, without) for plan in plans]
            rows.append(row(name, improver, whole, rest) | {"steps": options.steps})
            print(line(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
