"""What the scheduler's limits protect from: each as it is, and without it, where half and twice change no plan.

    python benchmarks/portfolio_limits.py [--only FLOOR,GRACE] [--json FILE]

``FLOOR``: proofs of (16, 8) of ``plan_video_mix.py``, five seeds, 2000 steps each. ``GRACE``: the first
plan of 4096 clips on 1024 GPUs, and the bound of 2000 chains of which no two are alike. ``PLACED`` and ``LOOKS``: a
list schedule of degrees drawn at random, placed on few process groups. Seconds are of processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from ablations import costed
from plan_video_mix import instance
from traced_stages import video_mix

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.planning import family_placement
from arachnec.planning.formulate import problem_of, scheduled
from arachnec.planning.placement import end_of
from arachnec.solver import chain_bound, portfolio, search
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import Clock
from arachnec.solver.list_schedule import list_schedule, orders
from arachnec.solver.problem import Choice, Job, Problem, Solution
from arachnec.solver.search import solve

NEVER = 10**9
STEPS, SEEDS = 2000, range(100, 105)
# A limit, the modules that read it, and what is in its place where there is none.
LIMITS = {
    "FLOOR": ((portfolio,), 0.0),
    "GRACE": ((search, chain_bound), float(NEVER)),
    "PLACED": ((family_placement, family_placement), NEVER),
    "LOOKS": ((family_placement,), NEVER),
}
Row = dict[str, object]


def proofs() -> Iterator[Row]:
    answers = [solve(instance(16, 8, seed, wide=False), Clock(time.perf_counter(), 0.0, STEPS), 0) for seed in SEEDS]
    yield {"problem": "(16, 8), five seeds", "proofs": sum(answer.proved for answer in answers)}


def first_plan() -> Iterator[Row]:
    problem = instance(4096, 1024, 0, wide=True)
    before = time.process_time()
    answer = solve(problem, Clock(time.perf_counter(), 0.0), 0)
    seconds = time.process_time() - before
    gap = answer.schedule.makespan(problem) / answer.area_bound - 1
    yield {"problem": "4096 clips, 1024 GPUs", "seconds": round(seconds, 2), "gap": round(gap, 6)}
    problem = unlike_chains(2000, 512)
    before = time.process_time()
    bound = lower_bound(problem)
    yield {"problem": "2000 chains", "seconds": round(time.process_time() - before, 3), "bound": bound}


def unlike_chains(count: int, gpus: int) -> Problem:
    """Of two jobs each, with times drawn at random."""
    rng, jobs = random.Random(0), []
    for chain in range(count):
        for place, degrees in enumerate(((1, 2, 4), (1, 2, 4, 8, 16))):
            ticks = rng.randrange(10**6, 10**8)
            choices = tuple(Choice(d, int(ticks * (1 + 0.05 * k) / d)) for k, d in enumerate(degrees))
            jobs.append(Job(choices, (2 * chain,) if place else ()))
    return Problem(tuple(jobs), gpus)


def groups() -> Iterator[Row]:
    for model, clips, cluster in (("wan2_1_14b", 128, "8x8:h100-80g"), ("hunyuanvideo", 512, "32x8:h100-80g")):
        module = costed(model, video_mix(clips, 0), cluster)
        cost = CostModel(module)
        free = of_any_degrees(module, cost)
        before = time.process_time()
        placed = family_placement.placed_on_few_groups(free.cascades, cost)
        yield {
            "problem": f"{clips} clips, {cluster}",
            "seconds": round(time.process_time() - before, 2),
            "end": round(end_of(placed), 1),
            "outside": len(family_placement.outside(placed, cost)),
        }


def of_any_degrees(module: Module, cost: CostModel) -> Module:
    """A list schedule of degrees drawn at random, few of them the family's."""
    rng, problem = random.Random(0), problem_of(module, cost)
    picks = [rng.randrange(len(job.choices)) for job in problem.jobs]
    schedule = list_schedule(problem, picks, orders(problem, picks)[0])
    return scheduled(module, cost, problem, Solution(schedule, 1, 1, False, 0.0))


MEASURED: dict[str, Callable[[], Iterator[Row]]] = {
    "FLOOR": proofs,
    "GRACE": first_plan,
    "PLACED": groups,
    "LOOKS": groups,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LIMITS), help="names separated by commas")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.only.split(","):
        modules, none = LIMITS[name]
        for value in (getattr(modules[0], name), none):
            with ExitStack() as stack:
                for module in modules:
                    stack.enter_context(mock.patch.object(module, name, value))
                for row in MEASURED[name]():
                    rows.append({"limit": name, "value": value} | row)
                    print(json.dumps(rows[-1]), flush=True)
                    if options.json:
                        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
