"""AdaptiveLoad's imbalance (arXiv 2605.17923) on Open-Sora 2.0's buckets, and ours on the same draws.

    python benchmarks/adaptive_load.py [--draws 20000]

Video buckets at 768 px: 5 to 33 frames with 6 clips, 37 to 65 with 4, 69 to 97 with 3, 101 to 129 with 2; frames are
4k + 1. A clip of S tokens costs (8 + 4 ffn/h) S h^2 + 4 S^2 h with HunyuanVideo's width h = 3072 and ffn = 4 h. Eight
data-parallel ranks draw a bucket each, uniformly. Imbalance is the mean over ranks of (t_max - t) / t_max, averaged
over the draws. S_max is the longest clip's tokens. Where B S^p <= S_max^p limits the work, the memory holds what the
published batch sizes ask of it, two of the longest clips: with B S <= S_max the other limit would never bind.

With 20,000 draws: published batch sizes 0.400; equal tokens (B S <= S_max) 0.395; both limits 0.212 at p = 1.5, 0.200
at 1.8, 0.219 at 2. The paper reports 0.39 before and 0.189 after. The last line is what a planner may do that a draw
may not: the same micro-batches of both limits (p = 1.8), each on as many GPUs as the default scheduler chooses, where
degrees 2, 4 and 8 take 4, 8 and 15 % more GPU time. GPUs then idle for 0.019 of the makespan.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable

from arachnec.report import imbalance
from arachnec.solver.budget import Clock
from arachnec.solver.problem import Choice, Job, Problem
from arachnec.solver.search import solve

WIDTH, RANKS, SEED = 3072, 8, 0
SIDE = 768 // 16  # tokens along an edge: VAE stride 8, patch 2
PUBLISHED = dict.fromkeys(range(5, 34, 4), 6) | dict.fromkeys(range(37, 66, 4), 4)
PUBLISHED |= dict.fromkeys(range(69, 98, 4), 3) | dict.fromkeys(range(101, 130, 4), 2)
DEGREES = {1: 1.0, 2: 1.04, 4: 1.08, 8: 1.15}  # and what sharing a sequence costs
PLANNED_DRAWS = 200
STEPS = 1  # of search, so that every machine finds the same


def tokens(frames: int) -> int:
    return ((frames - 1) // 4 + 1) * SIDE * SIDE


def work(frames: int, clips: int) -> float:
    """FLOPs of one layer's forward."""
    s = tokens(frames)
    return clips * (24.0 * s * WIDTH**2 + 4.0 * s * s * WIDTH)


LONGEST = tokens(max(PUBLISHED))


def equal_tokens(frames: int) -> int:
    return max(1, LONGEST // tokens(frames))


def both_limits(p: float) -> Callable[[int], int]:
    """B S <= 2 S_max and B S^p <= S_max^p."""
    return lambda f: max(1, min(2 * LONGEST // tokens(f), math.floor((LONGEST / tokens(f)) ** p)))


def mean_imbalance(clips: Callable[[int], int], draws: int) -> float:
    """Averaged over draws of one bucket per rank."""
    rng = random.Random(SEED)
    load = {frames: work(frames, clips(frames)) for frames in PUBLISHED}
    frames = list(PUBLISHED)
    return math.fsum(imbalance([load[f] for f in rng.choices(frames, k=RANKS)]) for _ in range(draws)) / draws


def planned_imbalance(clips: Callable[[int], int], draws: int) -> float:
    """The same micro-batches as moldable jobs: each GPU's share of the busy time of a schedule."""
    rng = random.Random(SEED)
    total = 0.0
    for _ in range(draws):
        drawn = rng.choices(list(PUBLISHED), k=RANKS)
        jobs = [
            Job(tuple(Choice(d, round(work(f, clips(f)) / 1e9 * slow / d)) for d, slow in DEGREES.items()))
            for f in drawn
        ]
        problem = Problem(tuple(jobs), RANKS)
        schedule = solve(problem, Clock(started=0.0, budget=0.0, steps=STEPS), SEED).schedule
        busy = sum(job.choices[k].area for job, k in zip(jobs, schedule.picks, strict=True))
        total += 1 - busy / (RANKS * schedule.makespan(problem))
    return total / draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20_000)
    draws = parser.parse_args().draws
    started = time.perf_counter()
    policies: list[tuple[str, Callable[[int], int]]] = [
        ("published batch sizes", PUBLISHED.__getitem__),
        ("equal tokens", equal_tokens),
        *((f"both limits, p = {p}", both_limits(p)) for p in (1.5, 1.8, 2.0)),
    ]
    for name, clips in policies:
        print(f"{name:36s} imbalance {mean_imbalance(clips, draws):.3f}")
    planned = planned_imbalance(both_limits(1.8), min(draws, PLANNED_DRAWS))
    print(f"{'both limits, p = 1.8, degrees planned':36s} imbalance {planned:.3f}")
    print(f"{draws} draws, {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
