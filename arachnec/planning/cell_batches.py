"""Clips to micro-batches that fill cells. In: clips and the size of a cell. Out: runs of clips of equal shape.

A cascade of a stage that is dealt out takes whole cells, where its clips run side by side. So a micro-batch has a
number of clips that divides the cell, or is a multiple of it: 11 equal clips on cells of 8 become 8, 2 and 1. Large
ones need fewer collectives and no cutting up; but several are needed for each cell, to balance them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from arachnec.cost.memory import RESERVE
from arachnec.ir.nodes import Clip, Module, Stage
from arachnec.ir.parameter_cells import gathered_gib
from arachnec.ir.stage_sizes import formula_in, gib

# That a cell has work for: more balance better, and cut up more (benchmarks/sharded/cells_makespan.py).
MICRO_BATCHES_PER_CELL = 2


def cell_batches(clips: Sequence[Clip], cell: int, limit_of: Callable[[Clip], float]) -> list[tuple[Clip, ...]]:
    """Runs of clips of equal shape, the largest first that fit ``limit_of(clip)`` clips in a cascade (at least one)."""
    shapes: dict[tuple[int, int, int, int], list[Clip]] = {}
    for clip in clips:
        shapes.setdefault((clip.frames, clip.height, clip.width, clip.text), []).append(clip)
    batches: list[tuple[Clip, ...]] = []
    for members in shapes.values():
        first = 0
        for count in counts(len(members), cell, limit_of(members[0])):
            batches.append(tuple(members[first : first + count]))
            first += count
    return batches


def counts(clips: int, cell: int, limit: float) -> Iterator[int]:
    """Numbers that add up to ``clips``, each a divisor or a multiple of the cell and at most ``limit``, or one."""
    while clips:
        most = min(clips, max(1, math.floor(limit + 1e-9)))
        count = most // cell * cell if most >= cell else max(n for n in range(1, most + 1) if cell % n == 0)
        yield count
        clips -= count


def most_in_memory(module: Module, stage: Stage, clip: Clip, cell: int) -> float:
    """How many such clips a cell holds side by side; infinite where the stage does not say.

    With nothing recomputed, or where the module is to fill cells with every block.
    """
    assert module.cluster is not None
    kept = "saved_recompute" if module.attrs.get("full") and "saved_recompute" in stage.attrs else "saved"
    formulas = filter(None, (formula_in(stage, name) for name in (kept, "workspace")))
    needed = sum(value(B=1, S=clip.tokens, T=clip.text) for value in formulas)
    if needed <= 0:
        return math.inf
    parts = [gib(other.attrs.get("state")) for other in module.stages if "part_of" in other.attrs]
    whole = sum(gib(other.attrs.get("state")) for other in module.stages if "part_of" not in other.attrs)
    state = whole + max(parts, default=0.0)
    needed *= max(1, len(parts))  # a pipeline's first stage holds as many micro-batches as there are stages
    room = (1 - RESERVE) * module.cluster.memory - state - gathered_gib(stage)
    return room * cell / needed
