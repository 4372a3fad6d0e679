"""Ranks that compute more slowly than the others, against their plans: a device that throttles, a host that is shared.

A rank's factor is its measured over its planned computing, divided by the median of the other ranks. Only a factor
that lasts is told, and told again only once it was gone. Where all ranks share every cascade none stands out: those
that wait for the slow one wait inside the cascade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

SLOW = 2.0  # a factor from which a rank counts as slow
STEPS = 4  # that it must last
LEAST_MS = 50.0  # of computing in a step: below, the system's own noise is as large


@dataclass(frozen=True)
class SlowRanks:
    """``lasting``: for how many steps each rank has been slow by now."""

    lasting: Mapping[int, int] = field(default_factory=dict)

    def after(self, planned: Sequence[float], measured: Sequence[float]) -> tuple[SlowRanks, dict[int, float]]:
        """With one more step, of which each rank's computing was so long; and the factors of ranks to tell of now."""
        known = factors(planned, measured)
        slow = {rank: factor for rank, factor in known.items() if factor >= SLOW and measured[rank] >= LEAST_MS}
        watch = SlowRanks({rank: self.lasting.get(rank, 0) + 1 for rank in slow})
        return watch, {rank: slow[rank] for rank, steps in watch.lasting.items() if steps == STEPS}


def factors(planned: Sequence[float], measured: Sequence[float]) -> dict[int, float]:
    """How much slower than the others each rank was, of those that had something to compute."""
    ratios = {
        rank: ms / expected
        for rank, (ms, expected) in enumerate(zip(measured, planned, strict=True))
        if ms > 0 and expected > 0
    }
    slower = {}
    for rank, ratio in ratios.items():
        others = [other for number, other in ratios.items() if number != rank]
        if others:
            slower[rank] = ratio / median(others)
    return slower
