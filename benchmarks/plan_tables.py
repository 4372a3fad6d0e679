"""How plans of random tables of measured durations compare with the lower bound and with CP-SAT on the same tables.

Chains of one to three stages (text encoder, VAE, transformer), as somebody would measure them for ``arachnec plan``:
durations that fall with the degree perfectly, by Amdahl's law, with a cost per doubling, or like the published table of
four tasks with its missing low degrees; sizes alike, uniform, log-normal or by Zipf's law; degrees that are powers of
two or not; a few tasks or hundreds on 1 to 256 GPUs::

    python benchmarks/plan_tables.py --budget 2000 --cp-sat 20 --cases 60
    python benchmarks/plan_tables.py --budget 2000 --only 17,23          # some cases again
    python benchmarks/plan_tables.py --write 17 > table.json             # to be planned by hand

Every plan goes the whole way of ``arachnec plan`` and is checked against its table alone. One line of JSON per case,
then a table per group of cases. ``gap`` is makespan / proved bound - 1, ``behind`` makespan / CP-SAT's - 1 (negative:
ahead of it), ``cp_bound_gap`` the gap to CP-SAT's own bound. CP-SAT needs the extra ``bench``, and gets its own seconds
with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module, quantity
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.duration_table import read_table
from arachnec.planning.formulate import problem_of
from arachnec.solver.problem import TICKS

CLUSTERS = ("6:cpu", "8:cpu", "12:cpu", "2x8:h20", "3x8:h20", "4x8:h20", "12x4:h20", "8x8:h20", "100:cpu", "32x8:h20")
TASKS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 200)
PUBLISHED = {  # VAE and transformer in s; four tasks whose optimum is known
    "D_97": ({1: 41.2, 2: 25.1, 4: 14.4, 8: 8.8}, {1: 29.84, 2: 15.26, 4: 7.73, 8: 3.94}),
    "D_121": ({1: 52.76, 2: 28.04, 4: 15.7, 8: 10.03}, {1: 45.2, 2: 22.81, 4: 11.55, 8: 5.83}),
    "D_221": ({2: 52.9, 4: 31.60, 8: 16.5}, {2: 74.8, 4: 40.35, 8: 18.36}),
    "D_241": ({2: 63.77, 4: 30.01, 8: 17.29}, {2: 92.94, 4: 42.7, 8: 21.58}),
}
STAGES = ("text", "vae", "dit")

Task = dict[str, Any]


def table(case: int) -> tuple[str, str, list[Task]]:
    """Group, cluster and tasks of one case; equal numbers, equal tables."""
    rng = random.Random(case)
    law = rng.choice(("published", "perfect", "amdahl", "doubling", "few degrees"))
    cluster = rng.choice(CLUSTERS)
    gpus = parse_cluster(cluster).world
    count = rng.choice([n for n in TASKS if n <= 4 * gpus])
    depth = rng.choice((1, 2, 2, 2, 3))
    sizes = _sizes(rng, count)
    tasks = []
    for number, size in enumerate(sizes):
        stages = _published(rng, size, gpus) if law == "published" else _stages(rng, law, depth, size, gpus)
        tasks.append({"name": f"t{number}", "stages": stages})
    return law, cluster, tasks


def _sizes(rng: random.Random, count: int) -> list[float]:
    kind = rng.choice(("alike", "uniform", "log-normal", "zipf", "kinds"))
    if kind == "kinds":
        some = [rng.uniform(0.2, 5) for _ in range(4)]
        return [rng.choice(some) for _ in range(count)]
    if kind == "zipf":
        return [10 / rank for rank in (rng.randint(1, 40) for _ in range(count))]
    draw = {
        "alike": lambda: 1.0,
        "uniform": lambda: rng.uniform(0.2, 3),
        "log-normal": lambda: rng.lognormvariate(0, 1),
    }
    return [draw[kind]() for _ in range(count)]


def _published(rng: random.Random, size: float, gpus: int) -> list[dict[str, Any]]:
    known = [name for name in PUBLISHED if min(PUBLISHED[name][0]) <= gpus]
    scale = rng.choice((1.0, 1.0, rng.uniform(0.8, 1.25), size))
    pair = PUBLISHED[rng.choice(known)]
    return [
        {"stage": stage, "ms": {str(d): round(1e3 * t * scale, 2) for d, t in times.items() if d <= gpus}}
        for stage, times in zip(("vae", "dit"), pair, strict=True)
    ]


def _stages(rng: random.Random, law: str, depth: int, size: float, gpus: int) -> list[dict[str, Any]]:
    share = {"text": 0.05, "vae": rng.choice((0.2, 0.5, 1.0)), "dit": 1.0}
    stages = []
    for stage in STAGES[-depth:]:
        work = 30_000 * size * share[stage]
        most = 1 if stage == "text" else gpus
        degrees = [d for d in (1, 2, 4, 8, 16, 32) if d <= most]
        if law == "few degrees":
            legal = range(1, min(most, 12) + 1)
            degrees = sorted(rng.sample(legal, min(len(legal), rng.randint(1, 4))))
        elif size > 2 and stage == "dit":
            degrees = [d for d in degrees if d > 1] or degrees
        serial = {"perfect": 0.0, "amdahl": 0.05, "doubling": 0.0, "few degrees": 0.03}[law]
        slower = 1.06 if law == "doubling" else 1.0
        ms = {str(d): round(work * (serial + (1 - serial) / d) * slower ** (d.bit_length() - 1), 2) for d in degrees}
        stages.append({"stage": stage, "ms": ms})
    return stages


def wrongs(module: Module, tasks: list[Task]) -> list[str]:
    """What is wrong with a plan, by its table alone."""
    problems, held, cascades = [], [], iter(module.cascades)
    for task in tasks:
        ready = 0.0
        for stage in task["stages"]:
            cascade = next(cascades)
            if str(cascade.degree) not in stage["ms"] or len(set(cascade.ranks)) != cascade.degree:
                problems.append(f"{cascade.name}: degree {cascade.degree} on {cascade.ranks}")
            elif cascade.end - cascade.start < stage["ms"][str(cascade.degree)] - 1e-6:
                problems.append(f"{cascade.name} is too short")
            if cascade.start < ready - 1e-6:
                problems.append(f"{cascade.name} does not wait")
            ready = cascade.end
            held += [(rank, cascade.start, cascade.end) for rank in cascade.ranks]
    for (rank, _, end), (other, start, _) in pairwise(sorted(held)):
        if rank == other and start < end - 1e-6:
            problems.append(f"rank {rank} is in two cascades at {start} ms")
    return problems


def measured(case: int, budget: float, cp_seconds: float) -> dict[str, object]:
    group, cluster, tasks = table(case)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        file.write_text(json.dumps({"unit": "ms", "tasks": tasks}))
        costed = read_table(file, parse_cluster(cluster)).module
    started = time.perf_counter()
    planned = Pipeline.parse(f"schedule-z3{{budget={budget}ms}},place").run(costed)
    seconds = time.perf_counter() - started
    makespan, bound = quantity(planned.attrs["makespan"]), quantity(planned.attrs["bound"])
    wrong = wrongs(planned, tasks)
    if bound > makespan * (1 + 1e-9):
        wrong.append("the bound is above the makespan")
    row: dict[str, object] = {
        "case": case,
        "group": group,
        "tasks": len(tasks),
        "stages": len(tasks[0]["stages"]),
        "cluster": cluster,
        "makespan_ms": round(makespan, 3),
        "gap": round(makespan / bound - 1, 5),
        "area_gap": round(makespan / quantity(planned.attrs["area_bound"]) - 1, 5),
        "proved": planned.attrs["proved"],
        "seconds": round(seconds, 2),
    }
    if cp_seconds > 0:
        from plan_peers import cp_sat

        problem = problem_of(costed, CostModel(costed))
        answer = cp_sat(problem, cp_seconds)
        if answer.schedule is not None:
            theirs = answer.schedule.makespan(problem) / TICKS
            row |= {
                "cp_sat_ms": round(theirs, 3),
                "cp_proved": answer.proved,
                "behind": round(makespan / theirs - 1, 5),
            }
            if planned.attrs["proved"] is True and theirs < makespan * (1 - 1e-9):
                wrong.append("proved optimal, and CP-SAT is ahead")
        row["cp_bound_gap"] = round(makespan / answer.bound * TICKS - 1, 5) if answer.bound else None
        if answer.bound / TICKS > makespan * (1 + 1e-9):
            wrong.append("shorter than CP-SAT's bound")
    return row | {"wrong": wrong, "load": round(os.getloadavg()[0], 1)}


def summary(rows: list[dict[str, Any]]) -> str:
    """A row per group: gaps to our bound, and where CP-SAT found something, how far behind or ahead of it."""
    heads = (
        "durations",
        "cases",
        "proved",
        "median gap",
        "mean gap",
        "most",
        "CP-SAT ahead by > 0.5 %",
        "most",
        "behind",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for group in [*sorted({row["group"] for row in rows}), "all"]:
        some = [row for row in rows if group in (row["group"], "all")]
        gaps = [row["gap"] for row in some]
        behind = [row["behind"] for row in some if "behind" in row]
        cells = [group, str(len(some)), str(sum(row["proved"] for row in some)), f"{statistics.median(gaps):.2%}"]
        cells += [f"{statistics.mean(gaps):.2%}", f"{max(gaps):.2%}", str(sum(value > 0.005 for value in behind))]
        cells += [f"{max(behind, default=0):.2%}", str(sum(value < -0.005 for value in behind))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=2000.0, help="ms for each plan")
    parser.add_argument("--cp-sat", type=float, default=0.0, help="seconds for CP-SAT; 0 leaves it out")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="such as 17,23")
    parser.add_argument("--write", type=int, help="print the table of this case")
    options = parser.parse_args()
    if options.write is not None:
        tasks = table(options.write)[2]
        print(json.dumps({"unit": "ms", "tasks": tasks}, indent=1))
        return
    cases = map(int, options.only.split(",")) if options.only else range(options.first, options.first + options.cases)
    rows = []
    for case in cases:
        rows.append(measured(case, options.budget, options.cp_sat))
        print(json.dumps(rows[-1]), flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
