"""Zero-bubble schedules with one stage a rank (Qi et al., 2401.10241, sections 2.3 and 3): ZB-H1 and ZB-H2.

The backward is split. Activation gradients are on the way of other ranks, weight gradients wait and fill the bubbles.
"""

from __future__ import annotations

from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Order,
    PipelineSchedule,
)
from arachnec.pipelining.arguments import require_positive


def zb_h1(stages: int, micro_batches: int) -> PipelineSchedule:
    """Rank r goes p - 1 - r forwards ahead and keeps r weight gradients back, so every rank holds p micro-batches."""
    require_positive(stages=stages, micro_batches=micro_batches)
    return PipelineSchedule(tuple(_order(r, micro_batches, stages - 1 - r, r) for r in range(stages)))


def zb_h2(stages: int, micro_batches: int) -> PipelineSchedule:
    """Twice as far ahead, and twice as many kept back: every rank holds up to 2p - 1 micro-batches.

    With equal times no rank idles between its own first and last action. A step that starts and ends together is no
    shorter for it.
    """
    require_positive(stages=stages, micro_batches=micro_batches)
    return PipelineSchedule(tuple(_order(r, micro_batches, 2 * (stages - 1 - r), 2 * r) for r in range(stages)))


def _order(stage: int, micro_batches: int, ahead: int, back: int) -> Order:
    """``ahead`` forwards, then forward and activation gradient in turn; each weight gradient ``back`` turns later."""
    ahead = min(ahead, micro_batches)
    order = [Action(stage, FORWARD, m) for m in range(ahead)]
    for m in range(micro_batches):
        if ahead + m < micro_batches:
            order.append(Action(stage, FORWARD, ahead + m))
        order.append(Action(stage, ACTIVATION_GRADIENT, m))
        if m >= back:
            order.append(Action(stage, WEIGHT_GRADIENT, m - back))
    order += [Action(stage, WEIGHT_GRADIENT, m) for m in range(max(0, micro_batches - back), micro_batches)]
    return tuple(order)
