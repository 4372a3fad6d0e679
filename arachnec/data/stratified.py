"""Batches that each have their share of every shape. In: the clips' shapes. Out: which clips make each batch.

Systematic sampling (Madow and Madow, 1944): clips in the order of their shapes are dealt out like cards, clip i to
batch i mod n. So a batch has of every shape its share, rounded up or down, and with k shapes there are at most k + 1
multisets of shapes among all batches, however many batches there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def stratified(shapes: Sequence[tuple[int, ...]], batches: int, rng: random.Random) -> list[list[int]]:
    """Positions in ``shapes``, each in one of the batches; clips of one shape are in random order.

    Sizes of batches differ by one at most. Neighbouring batches are alike: at most k times, for k shapes, one differs
    from that before it.
    """
    order = list(range(len(shapes)))
    rng.shuffle(order)
    order.sort(key=shapes.__getitem__)  # stable
    return [order[first::batches] for first in range(batches)]
