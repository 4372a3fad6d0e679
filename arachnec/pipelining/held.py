"""How many bytes of activations every rank holds, at most."""

from __future__ import annotations

from collections.abc import Sequence

from arachnec.pipelining.action import ACTIVATION_GRADIENT, BACKWARD, FORWARD, Order, PipelineSchedule

Table = Sequence[Sequence[float]]


def held(schedule: PipelineSchedule, saved: Table, kept_for_weight: Table | None = None) -> tuple[float, ...]:
    """The most that every rank holds at once, of ``saved[stage][micro_batch]``.

    A forward saves, its backward releases. A split backward releases all but ``kept_for_weight`` after the activation
    gradient, and that after the weight gradient; without that table it keeps everything. When does not matter: a
    rank's actions follow each other.
    """
    return tuple(
        _most(order, saved, saved if kept_for_weight is None else kept_for_weight) for order in schedule.orders
    )


def held_micro_batches(schedule: PipelineSchedule) -> tuple[int, ...]:
    """The most pairs of stage and micro-batch that every rank holds at once, until their last gradient."""
    ones = ((1,) * schedule.micro_batches,) * schedule.stages
    return tuple(int(count) for count in held(schedule, ones))


def _most(order: Order, saved: Table, kept: Table) -> float:
    now: float = 0
    most: float = 0
    for stage, kind, micro_batch in order:
        if kind == FORWARD:
            now += saved[stage][micro_batch]
            most = max(most, now)
        elif kind == BACKWARD:
            now -= saved[stage][micro_batch]
        elif kind == ACTIVATION_GRADIENT:
            now -= saved[stage][micro_batch] - kept[stage][micro_batch]
        else:
            now -= kept[stage][micro_batch]
    return most
