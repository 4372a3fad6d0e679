"""ZB-V: zero bubble in the memory of 1F1B (Qi et al., 2401.10241, section 6).

Two stages a rank, laid in a V: rank r has stage r and stage 2p - 1 - r, so the last rank turns round at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    Order,
    PipelineSchedule,
)
from arachnec.pipelining.arguments import require_positive


def zb_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """2 ``ranks`` stages; a rank holds at most 2p of them at once. Best for equal F, B and W, and m >= 2p."""
    require_positive(ranks=ranks, micro_batches=micro_batches)
    return PipelineSchedule(tuple(_order(rank, ranks, micro_batches) for rank in range(ranks)))


def _order(rank: int, ranks: int, micro_batches: int) -> Order:
    """The order for at least 2p - 1 micro-batches, without those that are not there."""
    count = max(2 * ranks - 1, micro_batches)

    def in_turn(stage: int, kind: Kind) -> Iterator[Action]:
        return iter([Action(stage, kind, m) for m in range(count)])

    down_f, down_i, down_w, up_f, up_i, up_w = (
        in_turn(stage, kind)
        for stage in (rank, 2 * ranks - 1 - rank)
        for kind in (FORWARD, ACTIVATION_GRADIENT, WEIGHT_GRADIENT)
    )
    behind = ranks - rank
    steady = count - ranks
    full = count - (2 * ranks - 1 - rank)  # rounds of the steady phase that still have a forward of the first stage
    turns = [
        *[down_f] * (2 * behind - 1),
        *[up_f, down_f] * rank,
        *[up_f, up_i, up_w] * behind,
        *[down_f, down_i, down_w, up_f, up_i, up_w] * full,
        *[down_i, down_w, up_f, up_i, up_w] * (steady - full),
        *[down_i, up_i] * rank,
        *[down_i, down_w] * behind,
        *[up_w] * rank,
        *[down_w] * rank,
    ]
    order = tuple(map(next, turns))
    if count == micro_batches:
        return order
    return tuple(action for action in order if action.micro_batch < micro_batches)
