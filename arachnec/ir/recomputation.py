"""How many of its stage's blocks a cascade recomputes. In: the attribute ``recompute``. Out: a number, and which.

The first ones in the order of the model: what they save lives longest, and when the backward comes to them, it has
freed what the others saved.
"""

from __future__ import annotations

from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Stage, formula, integer
from arachnec.ir.values import Formula, Value


def block_count(stage: Stage) -> int:
    """The stage's layers; 1 where it does not say: all or none of it is recomputed."""
    layers = stage.attrs.get("layers")
    return len(layers) if isinstance(layers, tuple) and layers else 1


def recomputed_blocks(value: Value | None, stage: Stage) -> int:
    """How many blocks ``recompute`` stands for: ``true`` for all, ``false`` and nothing for none."""
    if value is None or isinstance(value, bool):
        return block_count(stage) if value else 0
    return integer(value)


def recompute_value(blocks: int, stage: Stage) -> Value | None:
    """So many blocks as the passes write it: nothing for none, ``true`` for all."""
    if not blocks:
        return None
    return True if blocks == block_count(stage) else blocks


def recomputed_layers(value: Value | None, stage: Stage) -> frozenset[str] | bool:
    """The paths of the blocks that ``recompute`` stands for; True for all, False for none."""
    blocks = recomputed_blocks(value, stage)
    if blocks in (0, block_count(stage)):
        return blocks > 0
    return frozenset(path for path, _ in layers_of(stage)[:blocks])


def saved_by_recomputing(stage: Stage) -> tuple[tuple[int, Formula | None], ...]:
    """Runs of layers, and what recomputing each of them saves; one run without a formula where all save the same."""
    runs = stage.attrs.get("spared")
    if not isinstance(runs, tuple) or not runs:
        return ((block_count(stage), None),)
    return tuple((integer(run[0]), formula(run[1])) for run in runs if isinstance(run, tuple))
