"""Z3 on packings: do these jobs fit below a horizon, in aligned blocks on top of what is there?

Pseudo-Boolean constraints alone, no start times: per job one boolean for every option and block, exactly one of them
true; per GPU the ticks of the blocks that hold it are at most the horizon less its load; and the areas, each option's
width times its ticks, are at most what is free in all, which is redundant and what makes refusals fast. Options whose
area is more above the least of their job than is free in all are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import z3

from arachnec.solver.block_packing import Options, Placed
from arachnec.solver.problem import Effort, affordable, unit_for
from arachnec.solver.z3_question import Answer, Question, true


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
    question: Question | None = None,
) -> tuple[Answer, list[Placed] | None]:
    """Blocks, by their index in ``base``, for the jobs of these numbers; none is wider than ``widest``."""
    question = question or Question()
    solver = question.begin(effort, seed)
    rows = [[o for o in options[j] if o.width <= widest and heads[j] + o.ticks <= horizon] for j in jobs]
    free = _room(base, horizon)
    affordable_rows = affordable(rows, lambda option: option.width * option.ticks, free)
    if affordable_rows is None:
        return Answer.IMPOSSIBLE, None
    held: list[list[tuple[z3.BoolRef, int]]] = [[] for _ in base]
    areas: list[tuple[z3.BoolRef, int]] = []
    booleans: list[tuple[z3.BoolRef, Placed]] = []
    for j, row in zip(jobs, affordable_rows, strict=True):
        if question.late():
            return Answer.UNKNOWN, None
        one = []
        for option in row:
            for first in range(0, len(base) - option.width + 1, option.width):
                if max(base[first : first + option.width]) + option.ticks > horizon:
                    continue
                here = z3.Bool(f"at_{j}_{option.pick}_{first}", solver.ctx)
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
        coarse = unit_for(free)
        solver.add(z3.PbLe([(here, area // coarse) for here, area in areas], free // coarse))
    answer = question.check(solver)
    if answer is Answer.IMPOSSIBLE and unit > 1:
        return Answer.UNKNOWN, None
    if answer is not Answer.POSSIBLE:
        return answer, None
    model = solver.model()
    return answer, [placed for here, placed in booleans if true(model, here)]


def _room(base: Sequence[int], horizon: int) -> int:
    return sum(max(0, horizon - ticks) for ticks in base)
