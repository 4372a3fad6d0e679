"""What recomputing the first blocks of a stage saves.

``saved`` is kept for the backward where no block is recomputed, ``saved_recompute`` where all are, one whole block
included: the one that runs again. In between memory falls by what the blocks save, scaled to these two. Time grows with
the number of blocks, from no further forward to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from arachnec.ir.nodes import Stage
from arachnec.ir.stage_sizes import block_count, saved_by_recomputing
from arachnec.ir.values import Formula

Runs = Sequence[tuple[int, float]]  # so many blocks, and what recomputing each of them saves


def runs_of(stage: Stage, size: Callable[[Formula], float]) -> Runs:
    """The stage's runs of blocks, by what their formulas come to."""
    return [(count, 1.0 if saves is None else size(saves)) for count, saves in saved_by_recomputing(stage)]


def share_recomputed(stage: Stage, blocks: int) -> float:
    """The share of a forward that runs again: blocks count as equally long."""
    return blocks / block_count(stage) if blocks else 0.0


def share_saved(runs: Runs, blocks: int) -> float:
    """The share of what recomputing every block saves that the first ``blocks`` save."""
    total = math.fsum(count * spared for count, spared in runs)
    if total <= 0:
        return 0.0
    kept, left = [], blocks
    for count, spared in runs:
        again = min(count, left)
        kept.append((count - again) * spared)
        left -= again
    return 1 - math.fsum(kept) / total
