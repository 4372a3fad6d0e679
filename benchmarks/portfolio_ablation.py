"""What every improver of the scheduler's portfolio is worth: switched off alone, on the same problems and effort.

    python benchmarks/portfolio_ablation.py [--steps 500] [--cases 20] [--without annealing]

Problems are those of ``plan_tables.py`` (chains with measured durations) and of ``plan_video_mix.py`` (clips that wait
for nothing). Effort is counted in steps, so that the answer is the same on any machine. One row for each improver: how
many plans are longer, shorter or no more proved without it, and by how much the gap to the area bound changes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from plan_tables import table
from plan_video_mix import instance

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.planning.duration_table import read_table
from arachnec.planning.formulate import problem_of
from arachnec.solver.budget import Clock
from arachnec.solver.problem import Problem
from arachnec.solver.search import solve

IMPROVERS = (
    "list schedules",
    "justification",
    "annealing",
    "z3 tail",
    "z3 gap search",
    "exact packing",
    "large neighbourhoods",
)
SIZES = ((16, 8), (64, 32), (32, 32), (128, 64))


def tables(cases: int) -> list[Problem]:
    problems = []
    for case in range(cases):
        _, cluster, tasks = table(case)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "table.json"
            file.write_text(json.dumps({"unit": "ms", "tasks": tasks}))
            module = read_table(file, parse_cluster(cluster)).module
        problems.append(problem_of(module, CostModel(module)))
    return problems


def answers(problems: list[Problem], steps: int, without: tuple[str, ...]) -> list[tuple[float, bool]]:
    """Of every problem the gap and whether the plan is proved."""
    solved = [solve(problem, Clock(0.0, 0.0, steps=steps), seed=0, without=without) for problem in problems]
    return [
        (answer.schedule.makespan(problem) / answer.area_bound - 1, answer.proved)
        for problem, answer in zip(problems, solved, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--without", default=";".join(IMPROVERS), help="names separated by semicolons")
    options = parser.parse_args()
    groups = {
        "tables": tables(options.cases),
        "video mix": [instance(*size, seed, wide=wide) for size in SIZES for seed in (0, 1) for wide in (False, True)],
    }
    print("| problems | without | mean gap | change | longer | shorter | proofs |\n|---|---|---|---|---|---|---|")
    for name, problems in groups.items():
        whole = answers(problems, options.steps, ())
        mean = statistics.mean(gap for gap, _ in whole)
        print(f"| {name} | nothing | {mean:.3%} | | | | {sum(proved for _, proved in whole)} |", flush=True)
        for improver in options.without.split(";"):
            rest = answers(problems, options.steps, (improver,))
            changes = [less[0] - more[0] for less, more in zip(rest, whole, strict=True)]
            longer, shorter = sum(c > 0 for c in changes), sum(c < 0 for c in changes)
            gap = statistics.mean(gap for gap, _ in rest)
            proofs = sum(proved for _, proved in rest)
            change = statistics.mean(changes)
            print(f"| {name} | {improver} | {gap:.3%} | {change:+.3%} | {longer} | {shorter} | {proofs} |", flush=True)


if __name__ == "__main__":
    main()
