"""A pipeline whose order is to be found: the times, what every forward saves, and what every rank may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from arachnec.pipelining.evaluate import StageTimes, Table, held
from arachnec.pipelining.one_f_one_b import one_f_one_b


@dataclass(frozen=True)
class OrderProblem:
    """``saved[stage][micro_batch]`` is held from the forward to the last gradient; ``limits[rank]`` in the same unit.

    ``placement[stage]`` is its rank.
    """

    times: StageTimes
    saved: Table
    limits: Sequence[float]
    placement: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.times.forward)

    @property
    def micro_batches(self) -> int:
        return len(self.times.forward[0])

    @cached_property
    def backward(self) -> Table:
        """The whole backward of every stage and micro-batch."""
        if self.times.backward is not None:
            return self.times.backward
        halves = zip(self.times.activation_gradient, self.times.weight_gradient, strict=True)
        return [[i + w for i, w in zip(*rows, strict=True)] for rows in halves]

    @cached_property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank."""
        return tuple(
            tuple(stage for stage, rank in enumerate(self.placement) if rank == own)
            for own in range(1 + max(self.placement))
        )


def like_1f1b(times: StageTimes, saved: Table) -> OrderProblem:
    """One stage a rank, and no rank may hold more than in 1F1B with the micro-batches as they arrive."""
    stages = len(times.forward)
    arrival = one_f_one_b(stages, len(times.forward[0]))
    return OrderProblem(times, saved, held(arrival, saved), tuple(range(stages)))
