"""How close to the lower bound plans of a bucketed video mix come, how long that takes, and what other solvers reach.

N independent clips on M GPUs in nodes of eight: images and 256p, 480p and 720p clips of 17 to 121 frames on a
transformer of 5120 x 40, degrees that are powers of two, at most 20,000 tokens per GPU; ``wide`` allows degrees 16 and
32 across nodes too. The gap is makespan / area bound - 1, the bound being that of ``arachnec.solver.bound``::

    python benchmarks/plan_video_mix.py --budget 1000                    # ours alone, both variants
    python benchmarks/plan_video_mix.py --budget 1000 --peers cp-sat,highs,arachne-ga
    python benchmarks/processor_time.py plan_video_mix.py --budget 0 --repeat 15    # how soon there is a first plan
    python benchmarks/plan_video_mix.py --budget 5000 --sizes 16x8 --variants narrow --seeds 40 --first-seed 100

"first plan, ms" is when the first complete schedule was there, the largest of all seeds, in a warm process; "longest"
what the whole took, to be held against the budget. One line of JSON per size, variant and solver, then a table. Peers
run on the same problems in the same call, one after the other, each with the budget and two cores. CP-SAT needs the
extra ``bench``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable

from plan_peers import Answer, arachne_ga, cp_sat, highs
from video_mix import tokens

from arachnec.solver.budget import Clock
from arachnec.solver.problem import TICKS, Choice, Job, Problem, violations
from arachnec.solver.search import solve

SIZES = ((16, 8), (64, 32), (256, 64), (1024, 256), (4096, 1024), (32, 32), (128, 64), (512, 256))
SLOWDOWN = {1: 1.0, 2: 1.04, 4: 1.08, 8: 1.15}
SLOWDOWN_BETWEEN_NODES = {16: 1.35, 32: 1.60}
MOST_TOKENS_PER_GPU = 20_000


def instance(clips: int, gpus: int, seed: int, *, wide: bool) -> Problem:
    rng = random.Random(seed)
    slowdown = SLOWDOWN | SLOWDOWN_BETWEEN_NODES if wide else SLOWDOWN
    jobs = []
    for _ in range(clips):
        s = tokens(rng)
        seconds = 40 * (4 * 5120 * s**2 + 28 * 5120**2 * s) * 4 / 4e14
        choices = [
            Choice(degree, round(seconds * factor / degree * 1e3 * TICKS))
            for degree, factor in slowdown.items()
            if degree <= gpus and s / degree <= MOST_TOKENS_PER_GPU
        ]
        jobs.append(Job(tuple(choices)))
    return Problem(tuple(jobs), gpus)


def ours(problem: Problem, seconds: float) -> Answer:
    started = time.perf_counter()
    solution = solve(problem, Clock(started, seconds * 1e3), seed=0)
    return Answer(solution.schedule, solution.proved, time.perf_counter() - started, solution.first_ms)


def first(problem: Problem, seconds: float) -> Answer:
    """The first complete plan: a budget of zero."""
    return ours(problem, 0.0)


SOLVERS: dict[str, Callable[[Problem, float], Answer]] = {
    "default": ours,
    "first plan": first,
    "cp-sat": cp_sat,
    "highs": highs,
    "arachne-ga": arachne_ga,
}


def measured(
    name: str,
    clips: int,
    gpus: int,
    seeds: int,
    seconds: float,
    *,
    wide: bool,
    first_seed: int = 0,
    repeat: int = 1,
) -> dict[str, object]:
    gaps, walls, firsts, proved = [], [], [], 0
    for seed in range(first_seed, first_seed + seeds):
        problem = instance(clips, gpus, seed, wide=wide)
        bound = solve(problem, Clock(time.perf_counter(), 0.0), seed=0).area_bound
        answer = SOLVERS[name](problem, seconds)
        walls.append(answer.seconds)
        again = [SOLVERS[name](problem, seconds).first_ms for _ in range(repeat - 1)]
        firsts.append(None if answer.first_ms is None else min([answer.first_ms, *filter(None, again)]))
        proved += answer.proved
        if answer.schedule is None:
            gaps.append(float("inf"))
            continue
        assert not violations(problem, answer.schedule)
        gaps.append(answer.schedule.makespan(problem) / bound - 1)
    return {
        "solver": name,
        "clips": clips,
        "gpus": gpus,
        "wide": wide,
        "seeds": seeds,
        "budget_ms": 0.0 if name == "first plan" else seconds * 1e3,
        "gaps": [None if gap == float("inf") else round(gap, 6) for gap in gaps],
        "median_gap": statistics.median(gaps),
        "proved": proved,
        "median_wall_s": round(statistics.median(walls), 4),
        "most_wall_s": round(max(walls), 4),
        "most_over_budget_ms": round(1e3 * (max(walls) - seconds), 1),
        "first_ms": None if None in firsts else round(max(filter(None, firsts), default=0.0), 1),
        "load": round(os.getloadavg()[0], 1),
    }


def table(rows: list[dict[str, object]]) -> str:
    """The median gaps, a row per size and variant and a column per solver; then what else is known of the first."""
    names = list(dict.fromkeys(str(row["solver"]) for row in rows))
    sizes = list(dict.fromkeys((row["clips"], row["gpus"], row["wide"]) for row in rows))
    heads = ["clips, GPUs, degrees", *names, "proved", "first plan, ms", "longest, s"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for clips, gpus, wide in sizes:
        cells = []
        for name in names:
            runs = [r for r in rows if (r["clips"], r["gpus"], r["wide"], r["solver"]) == (clips, gpus, wide, name)]
            gap = runs[0]["median_gap"] if runs else None
            cells.append("none" if not isinstance(gap, float) or gap == float("inf") else f"{gap:.2%}")
        own = next(r for r in rows if (r["clips"], r["gpus"], r["wide"], r["solver"]) == (clips, gpus, wide, names[0]))
        cells += [f"{own['proved']} of {own['seeds']}", str(own["first_ms"]), str(own["most_wall_s"])]
        lines.append(f"| {clips}, {gpus}, to {32 if wide else 8} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1000.0, help="ms for each plan")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=1, help="plans of each problem; the earliest first one counts")
    parser.add_argument("--sizes", default="all", help="such as 16x8,32x32")
    parser.add_argument("--largest", type=int, default=1024, help="GPUs")
    parser.add_argument("--variants", default="narrow,wide")
    parser.add_argument("--peers", default="", help=f"of {', '.join(name for name in SOLVERS if name != 'default')}")
    options = parser.parse_args()
    names = ["default", *filter(None, options.peers.split(","))]
    rows = []
    asked = (tuple(map(int, size.split("x"))) for size in options.sizes.split(","))
    sizes = SIZES if options.sizes == "all" else [(clips, gpus) for clips, gpus in asked]
    for variant in options.variants.split(","):
        for clips, gpus in sizes:
            for name in names if gpus <= options.largest else ():
                row = measured(
                    name,
                    clips,
                    gpus,
                    options.seeds,
                    options.budget / 1e3,
                    wide=variant == "wide",
                    first_seed=options.first_seed,
                    repeat=options.repeat,
                )
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
