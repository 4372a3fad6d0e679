"""What every part of the scheduler's portfolio is worth: switched off alone, on the same problems and effort.

    python benchmarks/portfolio_ablation.py [--steps 500] [--problems tables,placed] [--without annealing] [--json FILE]
    python benchmarks/processor_time.py portfolio_ablation.py --budget 500 --problems placed --without "..."

Problems are those of ``plan_tables.py`` (chains with measured durations), of ``plan_video_mix.py`` (clips that wait for
nothing), and modules of ``ablations.py`` whose plans are placed and simulated; ``many`` are such modules of more clips,
measured only where asked for. Effort is counted in steps, so that the answer is the same on any machine; ``--budget``
gives ms instead, for searches that know nothing else, and ``--steps 0`` says what is there first. One row for each
part, an improver, a view of the problem, or list schedules: how many plans are longer, shorter or no more proved
without it, and by how much their mean length changes. The rows of other seeds say which changes are chance.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from ablations import costed, long_clips
from plan_tables import table
from plan_video_mix import instance
from traced_stages import video_mix

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.planning import placed_search
from arachnec.planning.duration_table import read_table
from arachnec.planning.formulate import problem_of
from arachnec.planning.placed_objective import Following
from arachnec.planning.placed_search import Measure, solve_placed
from arachnec.solver import search
from arachnec.solver.budget import Clock
from arachnec.solver.list_schedule import list_schedules
from arachnec.solver.problem import TICKS, Problem
from arachnec.solver.search import solve
from arachnec.solver.widths import Nested

IMPROVERS = ("annealing", "z3 gap search", "large neighbourhoods", "placed search")
# What is no improver: the function that gives it, and what is in its place.
OTHERS: dict[str, tuple[ModuleType, str, Callable[..., Any]]] = {
    "list schedules": (search, "list_schedules", lambda problem, bound: islice(list_schedules(problem, bound), 1)),
    "static layouts": (search, "one_degree", lambda problem: ()),
    "justification": (search, "justified", lambda problem, schedule: schedule),
    "baselines": (placed_search, "baseline_layouts", lambda module, problem: ()),
    "view of the family": (placed_search, "with_family_degrees", lambda problem, cost: Nested.all_of(problem)),
    "view of nested widths": (placed_search, "nested", lambda problem, node, bound: []),
}
Row = dict[str, Any]
SIZES = ((16, 8), (64, 32), (32, 32), (128, 64), (512, 256))
SEED = "nothing, seed "

Begin = Callable[[], Clock]  # the clock of one plan
Plan = Callable[[Begin, int, tuple[str, ...]], tuple[float, bool]]  # clock, seed, without: gap, proved


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


def many() -> list[Plan]:
    """Where widths that nest are many, and so are the cascades to pack."""
    return [
        placed(costed("hunyuanvideo", video_mix(256, 1), "8x8:h100-80g")),
        placed(costed("hunyuanvideo", video_mix(512, 1), "16x8:h100-80g")),
        placed(costed("wan2_1_14b", video_mix(128, 2), "8x8:h100-80g")),
    ]


def counted(problem: Problem) -> Plan:
    """Plans of GPUs that are interchangeable, judged by their makespan."""

    def plan(begin: Begin, seed: int, without: tuple[str, ...]) -> tuple[float, bool]:
        answer = solve(problem, begin(), seed, without)
        return answer.schedule.makespan(problem) / answer.area_bound - 1, answer.proved

    return plan


def placed(module: Module) -> Plan:
    """Plans on a cluster, judged by their simulated iteration."""
    cost, following = CostModel(module), Following()
    problem = problem_of(module, cost)
    measure = Measure(module, cost, problem, following)

    def plan(begin: Begin, seed: int, without: tuple[str, ...]) -> tuple[float, bool]:
        answer = solve_placed(
            module, cost, problem, begin(), seed=seed, following=following, baselines=True, without=without
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


def without_part(name: str) -> AbstractContextManager[object]:
    """Where it is no improver, something else is in its place meanwhile."""
    if name not in OTHERS:
        return nullcontext()
    module, function, other = OTHERS[name]
    return mock.patch.object(module, function, other)


def clock_of(steps: int | None, budget: float) -> Begin:
    """Clocks of so many steps, or of so many ms."""
    return lambda: Clock(time.perf_counter(), budget, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--budget", type=float, help="ms for each plan instead of steps")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--problems", default="tables,mixes,placed")
    parser.add_argument("--without", default=";".join((*IMPROVERS, *OTHERS)), help="names separated by semicolons")
    parser.add_argument("--json", type=Path, help="write every gap there")
    options = parser.parse_args()
    groups = {"tables": lambda: tables(options.cases), "mixes": mixes, "placed": modules, "many": many}
    begin = clock_of(options.steps if options.budget is None else None, options.budget or 0.0)
    effort = {"steps": options.steps} if options.budget is None else {"budget_ms": options.budget}
    arms: list[tuple[str, int, tuple[str, ...]]] = [(f"{SEED}{seed}", seed, ()) for seed in range(options.seeds)]
    arms += [(part, 0, (part,)) for part in options.without.split(";")]
    rows = []
    print("| problems | without | mean gap | change of length | longer | shorter | proofs |")
    print("|---|---|---|---|---|---|---|")
    for name in options.problems.split(","):
        plans = groups[name]()
        whole: list[tuple[float, bool]] = []
        for part, seed, without in arms:
            with without_part(part):
                rest = [plan(begin, seed, without) for plan in plans]
            whole = whole or rest
            rows.append(row(name, part, whole, rest) | effort)
            print(line(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
