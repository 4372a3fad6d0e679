"""How many layers each stage gets, so that the busiest rank has the least to do, for stages already placed.

Stages are runs of layers, a rank has several. With one stage a rank this is the textbook's linear partition; with
several the sums over a rank's stages count, and simulated annealing over the cuts finds them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise

from arachnec.pipelining.pipeline_model import PipelineInstance

STEPS = 3000
WARMTH = 0.03  # of a rank's even share

Load = tuple[float, float, float]


def even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """Layers dealt out in order, the first stages one more where they do not divide."""
    whole, rest = divmod(layers, stages)
    return tuple(whole + (stage < rest) for stage in range(stages))


def balanced_sizes(instance: PipelineInstance, placement: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """First what overflows a rank's memory is least, then the busiest rank's time, then the sum of their squares."""
    rng = random.Random(seed)
    works = [layer.forward + layer.activation_gradient + layer.weight_gradient for layer in instance.layers]
    work = (0.0, *accumulate(works))
    # one micro-batch must fit beside the state
    state = (0.0, *accumulate(layer.state + layer.saved for layer in instance.layers))
    stages = len(placement)
    cuts = [0, *accumulate(even_sizes(len(works), stages))]

    def load(cuts: Sequence[int]) -> Load:
        busy, held = [0.0] * instance.ranks, [0.0] * instance.ranks
        for stage, rank in enumerate(placement):
            busy[rank] += (work[cuts[stage + 1]] - work[cuts[stage]]) / instance.speeds[rank]
            held[rank] += state[cuts[stage + 1]] - state[cuts[stage]]
        over = sum(max(0.0, a - b) for a, b in zip(held, instance.memory, strict=True))
        return over, max(busy), sum(time * time for time in busy)

    now = load(cuts)
    best, best_cuts = now, cuts
    warmth = WARMTH * work[-1] / sum(instance.speeds)
    for step in range(STEPS if stages > 1 else 0):
        moved = list(cuts)
        for _ in range(rng.choice((1, 1, 2, 3))):
            moved[rng.randrange(1, stages)] += rng.choice((-1, 1))
        if any(a >= b for a, b in pairwise(moved)):
            continue
        after = load(moved)
        worse = after[1] - now[1]
        warm = warmth * (1 - step / STEPS)
        if after <= now or (after[0] <= now[0] and rng.random() < math.exp(-max(0.0, worse) / warm)):
            now, cuts = after, moved
            if now < best:
                best, best_cuts = now, cuts
    return tuple(b - a for a, b in pairwise(best_cuts))
