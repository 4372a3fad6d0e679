"""Communicators that a rank needs over many plans, and what placing cascades on few groups costs.

Plans of the bucketed video mix (`plan_video_mix.py`), scheduled and placed twice each: with any groups, and with a
price on groups outside the family of aligned ones. A rank's communicators are counted over all plans together,
that of all ranks and that of the gradient all-reduces included, as if none was ever given up::

    python benchmarks/process_groups.py                        # 20 plans of 128 clips on 8x8 H100
    python benchmarks/process_groups.py --clips 48 --plans 5 --cluster mixed.toml

"lost" is the makespan with the family over that without, less 1: of all plans together, and of the worst.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from traced_stages import module_of, video_mix

from arachnec.analysis.communicators import HOST_HANDOFFS, Communicator, communicators, family, family_grids, heads_of
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module
from arachnec.lowering.programs import lower
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.family_placement import outside, placed_on_few_groups
from arachnec.planning.formulate import problem_of, scheduled
from arachnec.planning.placed_objective import Following
from arachnec.planning.placed_search import solve_placed
from arachnec.planning.placement import best_placements, end_of
from arachnec.solver.budget import Clock

MODELS = ("wan2_1_14b", "wan2_1_1_3b_vae", "hunyuanvideo")
COSTED = "shard-optimizer,partition{policy=dual},annotate"
EVERYONE = 1  # the group of all ranks


class Count:
    """The communicators of every rank over several plans."""

    def __init__(self) -> None:
        self.of_rank: dict[int, set[Communicator]] = defaultdict(set)
        self.ends: list[float] = []
        self.outside = 0
        self.most_of_one = 0  # of the ranks of one plan

    def add(self, scheduled: Module, placed: list[Cascade], cost: CostModel) -> None:
        named = {cascade.name: cascade for cascade in placed}
        cascades = tuple(named[cascade.name] for cascade in scheduled.cascades)
        everyone = tuple(range(cost.cluster.world))
        reductions = tuple(replace(one, attrs=one.attrs.updated(ranks=everyone)) for one in scheduled.reductions)
        module = replace(scheduled, level=Level.PLACED, cascades=cascades, reductions=reductions)
        for program in lower(module).programs:
            names = communicators(program, HOST_HANDOFFS)
            self.of_rank[program.rank] |= names
            self.most_of_one = max(self.most_of_one, len(names) + EVERYONE)
        self.ends.append(end_of(placed))
        self.outside += len(outside(placed, cost))

    @property
    def most(self) -> int:
        return max(map(len, self.of_rank.values())) + EVERYONE


def schedule(module: Module, cost: CostModel, budget: float, *, few_groups: bool) -> Module:
    """As ``schedule-z3`` does it, with groups outside the family for nothing or at their price."""
    problem, clock = problem_of(module, cost), Clock(time.perf_counter(), math.inf, budget)
    answer = solve_placed(
        module, cost, problem, clock, seed=0, following=Following(), baselines=True, few_groups=few_groups
    )
    return scheduled(module, cost, problem, answer)


def measured(model: str, clips: int, plans: int, cluster: str, budget: float) -> dict[str, object]:
    shortest, grouped = Count(), Count()
    for seed in range(plans):
        module = Pipeline.parse(COSTED).run(module_of(model, video_mix(clips, seed), cluster))
        cost = CostModel(module)
        free, kept = (schedule(module, cost, budget, few_groups=few) for few in (False, True))
        shortest.add(free, best_placements(free.cascades, cost), cost)
        grouped.add(kept, placed_on_few_groups(kept.cascades, cost), cost)
    heads = heads_of(module.stages)
    return {
        "model": model,
        "cluster": cluster,
        "clips": clips,
        "plans": plans,
        "grids": family_grids(cost.cluster, heads),
        "family_of_a_rank": max(
            sum(rank in g for g in family(cost.cluster, heads)) for rank in range(cost.cluster.world)
        ),
        "communicators_without": shortest.most,
        "communicators": grouped.most,
        "of_one_plan": grouped.most_of_one,
        "outside_without": shortest.outside,
        "outside": grouped.outside,
        "lost": sum(grouped.ends) / sum(shortest.ends) - 1,
        "most_lost": max(one / other - 1 for one, other in zip(grouped.ends, shortest.ends, strict=True)),
        "ends_ms": [round(end, 1) for end in grouped.ends],
    }


def table(rows: list[dict[str, object]]) -> str:
    heads = (
        "model",
        "clips",
        "plans",
        "communicators without",
        "with",
        "cascades outside, without",
        "with",
        "lost",
        "at most",
    )
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        keys = ("model", "clips", "plans", "communicators_without", "communicators", "outside_without", "outside")
        cells = [*(str(row[key]) for key in keys), f"{row['lost']:.3%}", f"{row['most_lost']:.3%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cluster", default="8x8:h100-80g")
    parser.add_argument("--clips", type=int, default=128)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--budget", type=float, default=500, help="steps of work for each plan, about a ms each")
    parser.add_argument("--output", type=Path, help="write the rows here, as JSON")
    options = parser.parse_args()
    rows = []
    for model in options.models.split(","):
        row = measured(model, options.clips, options.plans, options.cluster, options.budget)
        rows.append(row)
        print(json.dumps(row), flush=True)
    print(table(rows))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
