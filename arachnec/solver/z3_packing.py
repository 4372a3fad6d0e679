"""Z3 on packings: do these jobs fit below a horizon, in aligned blocks on top of what is there?

Pseudo-Boolean constraints alone, no start times: per job one boolean for every option and block, exactly one of them
true; per GPU the ticks of the blocks that hold it are at most the horizon less its load; and the areas, each option's
width times its ticks, are at most what is free in all, which is redundant and what makes refusals fast. Options whose
area is more above the least of their job than is free in all are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import z3

from arachnec.solver.block_packing import Option, Options, Placed
from arachnec.solver.problem import Effort, unit_for
from arachnec.solver.z3_schedule import Answer


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
    started = time.perf_counter()
    context = z3.Context()
    solver = z3.Solver(ctx=context)
    solver.set("random_seed", seed % 2**31)
    if effort.steps is not None:
        solver.set("rlimit", effort.steps)
    affordable = _affordable(jobs, options, heads, base, horizon, widest)
    if affordable is None:
        return Answer.IMPOSSIBLE, None
    held: list[list[tuple[z3.BoolRef, int]]] = [[] for _ in base]
    areas: list[tuple[z3.BoolRef, int]] = []
    booleans: list[tuple[z3.BoolRef, Placed]] = []
    for j, row in zip(jobs, affordable, strict=True):
        if effort.wall_ms is not None and (time.perf_counter() - started) * 1e3 > effort.wall_ms:
            return Answer.UNKNOWN, None
        one = []
        for option in row:
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
    # numbers too large for Z3 are rounded, lengths up: a packing found is one, a refusal is none
    unit = unit_for(horizon)
    for ticks, blocks in zip(base, held, strict=True):
        if blocks:
            solver.add(z3.PbLe([(here, -(-length // unit)) for here, length in blocks], (horizon - ticks) // unit))
    if areas:
        room = _room(base, horizon)
        coarse = unit_for(room)
        solver.add(z3.PbLe([(here, area // coarse) for here, area in areas], room // coarse))
    if effort.wall_ms is not None:  # making the question counts too
        solver.set("timeout", max(1, effort.wall_ms - int((time.perf_counter() - started) * 1e3)))
    answer = solver.check()
    if answer == z3.unsat and unit == 1:
        return Answer.IMPOSSIBLE, None
    if answer != z3.sat:
        return Answer.UNKNOWN, None
    model = solver.model()
    return Answer.FOUND, [placed for here, placed in booleans if z3.is_true(model.eval(here, model_completion=True))]


def _room(base: Sequence[int], horizon: int) -> int:
    return sum(max(0, horizon - ticks) for ticks in base)


def _affordable(
    jobs: Sequence[int], options: Options, heads: Sequence[int], base: Sequence[int], horizon: int, widest: int
) -> list[tuple[Option, ...]] | None:
    """Per job the options that end in time and leave area enough for the others; None where there are none."""
    timely = [
        tuple(option for option in options[j] if option.width <= widest and heads[j] + option.ticks <= horizon)
        for j in jobs
    ]
    if not all(timely):
        return None
    least = [min(option.width * option.ticks for option in row) for row in timely]
    spare = _room(base, horizon) - sum(least)
    return (
        [
            tuple(option for option in row if option.width * option.ticks - area <= spare)
            for row, area in zip(timely, least, strict=True)
        ]
        if spare >= 0
        else None
    )
