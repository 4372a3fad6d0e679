"""Whether the lists of heads that are divided by weight have the memory that was planned for them.

A plan counts for each rank all blocks in the lists of as many heads as it has where heads go by number. A rank with
many light heads, as they were assumed, may have more when they turn out heavy. It then computes more than a rank of a
dense layer does, so that this division is worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arachnec.ir.head_density import HeadPart


def heads_by_number(heads: int, ranks: int) -> int:
    """On the rank that has most."""
    return -(-heads // ranks)


def lists_fit(
    parts: Sequence[HeadPart], kept: Sequence[int], ranks: int, groups: int, blocks: int, captions: int
) -> bool:
    """Whether the lists of no rank are longer than was planned, where each head keeps so many of the ``blocks`` of
    video and all of ``captions``."""
    held = [0.0] * ranks
    for part in parts:
        held[part.place] += (part.stop - part.start) / groups * (kept[part.head] + captions) + 1
    return math.ceil(max(held)) <= heads_by_number(len(kept), ranks) * (blocks + captions + 1)
