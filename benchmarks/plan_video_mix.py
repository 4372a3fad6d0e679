"""How close to the lower bound plans of a bucketed video mix come, and how long that takes.

N independent clips on M GPUs in nodes of eight: images and 256p, 480p and 720p clips of 17 to 121 frames on a
transformer of 5120 x 40, degrees that are powers of two, at most 20,000 tokens per GPU. One line of JSON per size::

    python benchmarks/plan_video_mix.py --budget 1000 --wide
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from arachnec.passes.schedule_problem import TICKS, Choice, Job, Problem, violations
from arachnec.passes.schedule_z3 import Clock, solve

SIZES = ((16, 8), (64, 32), (256, 64), (1024, 256), (4096, 1024), (32, 32), (128, 64), (512, 256))
FRAMES = (17, 33, 49, 65, 81, 97, 121)
SLOWDOWN = {1: 1.0, 2: 1.04, 4: 1.08, 8: 1.15}
SLOWDOWN_BETWEEN_NODES = {16: 1.35, 32: 1.60}
MOST_TOKENS_PER_GPU = 20_000


def tokens(dice: random.Random) -> int:
    u = dice.random()
    if u < 0.35:
        return dice.choice((1024, 1560, 3600))
    latent = (dice.choice(FRAMES) - 1) // 4 + 1
    return latent * (400 if u < 0.60 else 1560 if u < 0.90 else 3600)


def instance(clips: int, gpus: int, seed: int, *, wide: bool) -> Problem:
    dice = random.Random(seed)
    slowdown = SLOWDOWN | SLOWDOWN_BETWEEN_NODES if wide else SLOWDOWN
    jobs = []
    for _ in range(clips):
        s = tokens(dice)
        seconds = 40 * (4 * 5120 * s**2 + 28 * 5120**2 * s) * 4 / 4e14
        choices = [
            Choice(degree, round(seconds * factor / degree * 1e3 * TICKS))
            for degree, factor in slowdown.items()
            if degree <= gpus and s / degree <= MOST_TOKENS_PER_GPU
        ]
        jobs.append(Job(tuple(choices)))
    return Problem(tuple(jobs), gpus)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=1000.0, help="ms for each plan")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--largest", type=int, default=1024, help="GPUs")
    parser.add_argument("--wide", action="store_true", help="degrees 16 and 32 across nodes too")
    options = parser.parse_args()
    for clips, gpus in SIZES:
        if gpus > options.largest:
            continue
        gaps, walls, proved = [], [], 0
        for seed in range(options.seeds):
            problem = instance(clips, gpus, seed, wide=options.wide)
            started = time.perf_counter()
            found = solve(problem, Clock(started, options.budget), seed=0)
            walls.append(time.perf_counter() - started)
            assert not violations(problem, found.schedule)
            gaps.append(found.schedule.makespan(problem) / found.area_bound - 1)
            proved += found.proved
        row = {
            "clips": clips,
            "gpus": gpus,
            "budget_ms": options.budget,
            "wide": options.wide,
            "median_gap_to_area_bound": statistics.median(gaps),
            "worst_gap_to_area_bound": max(gaps),
            "proved": proved,
            "instances": options.seeds,
            "median_wall_s": statistics.median(walls),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
