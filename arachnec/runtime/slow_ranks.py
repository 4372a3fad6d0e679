"""Ranks that compute more slowly than the others, and when plans are made for that: a device that throttles, a host
that is shared.

A rank's slowdown is its measured over its planned computing, divided by the median of the other ranks; times what it
was planned with, where that is more than 1. Where all ranks share every cascade none stands out: those that wait for
the slow one wait inside the cascade. A slowdown that lasts becomes a fact of the cluster, and the plans behind it give
the rank less work; one that is over is forgotten.

Always true: a change of plans needs ``STEPS`` steps that agree. Every change of one rank doubles the steps that its
next one needs, so a rank that is slow by turns does not have plans follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

SLOW = 2.0  # a slowdown from which a rank counts as slow
OTHERWISE = 1.5  # how far a slow rank may be off what it is planned with
STEPS = 4  # that a slowdown must last
MOST_STEPS = 512
IDLE = 16  # times as many steps without work until a slow rank is tried again
LEAST_MS = 50.0  # of computing in a step: below, the system's own noise is as large


@dataclass(frozen=True)
class Seen:
    """Of one rank: its latest slowdowns in a row that say the same, how many steps it was idle, and how many steps its
    next change of plans needs."""

    slowdowns: tuple[float, ...] = ()
    idle: int = 0
    needed: int = STEPS


@dataclass(frozen=True)
class SlowRanks:
    """``planned``: the slowdowns that plans are made with from now on, by rank."""

    planned: Mapping[int, float] = field(default_factory=dict)
    seen: Mapping[int, Seen] = field(default_factory=dict)

    def after(
        self, planned: Sequence[float], measured: Sequence[float], counted: Mapping[int, float] | None = None
    ) -> SlowRanks:
        """With one more step, of which each rank's computing was so long; ``counted`` are the slowdowns that the step
        was planned with."""
        counted = counted or {}
        known = factors([ms / counted.get(rank, 1.0) for rank, ms in enumerate(planned)], measured)
        known |= {rank: counted[rank] * ms for rank, ms in factors(planned, measured).items() if rank in counted}
        following, seen = dict(self.planned), dict(self.seen)
        for rank, ms in enumerate(measured):
            now = self.planned.get(rank, 1.0)
            before = self.seen.get(rank, Seen())
            slowdown = known.get(rank)
            if slowdown is not None and slowdown > now and ms < LEAST_MS:
                slowdown = None  # of little work most is launching it
            own = _seen(before, now, slowdown, works=planned[rank] > 0)
            if len(own.slowdowns) >= own.needed:
                following[rank] = median(own.slowdowns[-STEPS:])
            if own.idle >= IDLE * own.needed and now > 1.0:  # nobody knows, so it is tried
                following[rank] = 1.0
            if following.get(rank, 1.0) < SLOW:
                following.pop(rank, None)
            if following.get(rank, 1.0) != now:
                own = Seen(needed=min(MOST_STEPS, 2 * own.needed))
            seen[rank] = own
        return replace(self, planned=following, seen=seen)


def _seen(before: Seen, now: float, slowdown: float | None, *, works: bool) -> Seen:
    """With one more step of a rank that is planned with the slowdown ``now``."""
    idle = 0 if works else before.idle + 1
    if slowdown is None:
        return replace(before, slowdowns=before.slowdowns if not works else (), idle=idle)
    becomes_slow = now < SLOW <= slowdown
    otherwise = now >= SLOW and max(slowdown / now, now / slowdown) >= OTHERWISE
    changes = becomes_slow or otherwise
    return replace(before, slowdowns=(*before.slowdowns, slowdown) if changes else (), idle=idle)


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


def notes_of_slow(before: Mapping[int, float], now: Mapping[int, float], step: int) -> list[str]:
    """What a person should know where plans change with ``step``."""
    slow = [
        f"rank {rank} computes {now[rank]:.1f} times as slowly as the others: from step {step} on it gets less work, "
        "where the plan's pipeline can give it less; see to its host and device"
        for rank in sorted(now)
        if now[rank] != before.get(rank)
    ]
    over = [f"rank {rank} is planned like the others again from step {step} on" for rank in sorted({*before} - {*now})]
    return slow + over
