"""GiB of the lists of key blocks that layers attend to, at most: whatever densities a run measures."""

from __future__ import annotations

import math

from arachnec.ir.head_density import latest_densities, sparse_layers
from arachnec.ir.nodes import Cascade, Clip, Stage
from arachnec.ir.stage_sizes import count_in
from arachnec.sparsity.clip_cubes import caption_blocks, clip_cubes
from arachnec.sparsity.list_room import heads_by_number

GIB = 2**30
ENTRY = 4  # bytes of a key block's number in a list, and of a list's length


def lists_gib(stage: Stage, cascade: Cascade, ranks: int, clip: Clip | None = None) -> float:
    """GiB of a cascade's lists on any of the ``ranks`` of a clip; kept from the forward to the end of the backward.
    Without a ``clip`` its tokens stand in one row.

    What a run that trains measures is not known: it counts all blocks in every list. Heads are counted as they are
    where they go by number; a run divides them otherwise only where that keeps to it (``list_room``). Of a model that
    samples densities stay as they are, and heads are divided as evenly as they can be.
    """
    layers = sparse_layers(cascade)
    if not layers or not count_in(stage, "query_group") or not count_in(stage, "key_block"):
        return 0.0
    groups, blocks = clip_cubes(stage, cascade.tokens, clip)
    captions, table, entries = caption_blocks(stage, cascade.text), latest_densities(stage), 0.0
    for layer in layers:
        densities = table[layer].at(cascade.tokens).heads
        kept = [blocks if stage.trained else min(blocks, math.ceil(density * blocks)) for density in densities]
        listed = sum(kept) + len(kept) * (captions + 1)  # with the length of each list
        entries += groups * listed * heads_by_number(len(kept), ranks) / len(kept)
    return cascade.batch * entries * ENTRY / GIB
