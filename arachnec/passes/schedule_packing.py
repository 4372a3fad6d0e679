"""Z3 on packings: do these jobs fit below a horizon, in aligned blocks on top of what is there?

Pseudo-Boolean constraints alone, no start times: per job one boolean for every option and block, exactly one of them
true; per GPU the ticks of the blocks that hold it are at most the horizon less its load; and the areas, each option's
width times its ticks, are at most what is free in all, which is redundant and what makes refusals fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import z3

from arachnec.passes.schedule_blocks import Options, Placed
from arachnec.passes.schedule_problem import Effort
from arachnec.passes.schedule_window import Answer


def find_packing(
    jobs: Sequence[int],
    options: Options,
    heads: Sequence[int],
    base: Sequence[int],
    horizon: int,
    widest: int,
    *,
    seed: int,
    effort: Effort,
) -> tuple[Answer, list[Placed] | None]:
    """Blocks, by their index in ``base``, for the jobs of these numbers; none is wider than ``widest``."""
    context = z3.Context()
    solver = z3.Solver(ctx=context)
    solver.set("random_seed", seed % 2**31)
    if effort.steps is not None:
        solver.set("rlimit", effort.steps)
    if effort.wall_ms is not None:
        solver.set("timeout", max(1, effort.wall_ms))
    held: list[list[tuple[z3.BoolRef, int]]] = [[] for _ in base]
    areas: list[tuple[z3.BoolRef, int]] = []
    booleans: list[tuple[z3.BoolRef, Placed]] = []
    for j in jobs:
        one = []
        for option in options[j]:
            if option.width > widest or heads[j] + option.ticks > horizon:
                continue
            for first in range(0, len(base) - option.width + 1, option.width):
                if max(base[first : first + option.width]) + option.ticks > horizon:
                    continue
                here = z3.Bool(f"at_{j}_{option.pick}_{first}", context)
                one.append((here, 1))
                booleans.append((here, Placed(j, option, first)))
                areas.append((here, option.width * option.ticks))
                for gpu in range(first, first + option.width):
                    held[gpu].append((here, option.ticks))
        if not one:
            return Answer.IMPOSSIBLE, None
        solver.add(z3.PbEq(one, 1))
    for ticks, row in zip(base, held, strict=True):
        if row:
            solver.add(z3.PbLe(row, horizon - ticks))
    if areas:
        solver.add(z3.PbLe(areas, sum(max(0, horizon - ticks) for ticks in base)))
    answer = solver.check()
    if answer == z3.unsat:
        return Answer.IMPOSSIBLE, None
    if answer != z3.sat:
        return Answer.UNKNOWN, None
    model = solver.model()
    return Answer.FOUND, [placed for here, placed in booleans if z3.is_true(model.eval(here, model_completion=True))]
