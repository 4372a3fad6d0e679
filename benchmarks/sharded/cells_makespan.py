"""What whole cells cost the makespan: the bucketed video mix with cascades on any ranks, and on cells of eight.

The clips, their times and their limits are those of ``plan_video_mix``: N independent clips on M GPUs, degrees 1, 2, 4
and 8, at most 20,000 tokens per GPU. In cells, equal clips become micro-batches as ``partition`` makes them
(``planning.cell_batches``), and a cascade takes its cells as the cheapest grid of clips side by side x degree. Gathers
take no time here: this is what the restriction to cells costs alone::

    python benchmarks/sharded/cells_makespan.py --clips 256 --gpus 64 --seeds 5 --budget 1000

Prints for each seed both makespans over the same bound, that of any ranks, and the mean cost of cells.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from plan_video_mix import MOST_TOKENS_PER_GPU, SLOWDOWN, instance
from video_mix import tokens

from arachnec.ir.nodes import Clip
from arachnec.planning.cell_batches import MICRO_BATCHES_PER_CELL, cell_batches
from arachnec.solver.budget import Clock
from arachnec.solver.problem import TICKS, Choice, Job, Problem, Solution
from arachnec.solver.search import solve

POWER = 1.8  # work ~ S^p, as `partition` fits it over these lengths


def seconds_of(length: int, degree: int) -> float:
    return 40 * (4 * 5120 * length**2 + 28 * 5120**2 * length) * 4 / 4e14 * SLOWDOWN[degree] / degree


def clips_of(count: int, seed: int) -> list[Clip]:
    """The clips of ``instance``; the length stands for the shape."""
    rng = random.Random(seed)
    return [Clip(number, length, 16, 16, 0, length) for number, length in enumerate(tokens(rng) for _ in range(count))]


def in_cells(clips: list[Clip], gpus: int, cell: int) -> Problem:
    """Every micro-batch on one cell, by its cheapest grid; cells are the problem's machines."""
    longest = max(clip.tokens for clip in clips)
    work = math.fsum(clip.tokens**POWER for clip in clips)
    most_work = min(float(longest) ** POWER, work / (MICRO_BATCHES_PER_CELL * gpus))

    def limit(clip: Clip) -> float:
        most = min(MOST_TOKENS_PER_GPU / clip.tokens, most_work / clip.tokens**POWER)
        return cell * most

    jobs = []
    for batch in cell_batches(clips, cell, limit):
        length, count = batch[0].tokens, len(batch)
        grids = [
            count // side * seconds_of(length, cell // side)
            for side in range(1, min(count, cell) + 1)
            if count % side == 0 and cell % side == 0 and length / (cell // side) <= MOST_TOKENS_PER_GPU
        ]
        jobs.append(Job((Choice(1, max(1, round(min(grids) * 1e3 * TICKS))),)))
    return Problem(tuple(jobs), gpus // cell)


def solved(problem: Problem, budget_ms: float) -> Solution:
    return solve(problem, Clock(time.perf_counter(), budget_ms), seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=256)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--cell", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=1000.0, help="ms for each plan")
    options = parser.parse_args()
    costs = []
    for seed in range(options.seeds):
        free = instance(options.clips, options.gpus, seed, wide=False)
        cells = in_cells(clips_of(options.clips, seed), options.gpus, options.cell)
        anywhere, whole = solved(free, options.budget), solved(cells, options.budget)
        bound = anywhere.area_bound
        spans = [answer.schedule.makespan(p) for answer, p in ((anywhere, free), (whole, cells))]
        costs.append(spans[1] / spans[0] - 1)
        row = {"seed": seed, "cascades": len(cells.jobs), "any_ranks_over_bound": spans[0] / bound - 1}
        row |= {"cells_over_bound": spans[1] / bound - 1, "cells_cost": costs[-1]}
        print(json.dumps({key: round(value, 5) for key, value in row.items()}), flush=True)
    print(f"cells of {options.cell} cost {statistics.mean(costs):.2%} of the makespan, at most {max(costs):.2%}")


if __name__ == "__main__":
    main()
