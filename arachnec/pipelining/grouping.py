"""Choose k of kFkB by the transfer times that were measured (Ada-Grouper, 2303.01675, section 4).

Slow links: a larger k sends the next micro-batch of a group while this one computes. Every rank then holds k times as
many. So k is the one with the shortest step, by the exact evaluation, of those that the memory holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.errors import GroupExceedsMemory
from arachnec.pipelining.evaluate import StageTimes, Table, evaluate, held
from arachnec.pipelining.one_f_one_b import kfkb

WORTH = 0.01  # of a step: less does not make it change its k


@dataclass(frozen=True)
class Grouping:
    """The k to use, and the makespan of every k that the memory holds."""

    k: int
    makespans: dict[int, float]

    @property
    def modest(self) -> int:
        """The smallest k whose step is within a hundredth of the shortest: larger ones hold more."""
        shortest = min(self.makespans.values())
        return min(k for k, makespan in self.makespans.items() if makespan * (1 - WORTH) <= shortest)


def groupings(micro_batches: int) -> list[int]:
    """Values of k worth a look: the divisors of m, and the powers of two below it, whose last group is smaller."""
    return [k for k in range(1, micro_batches + 1) if micro_batches % k == 0 or k & (k - 1) == 0]


def choose_k(
    times: StageTimes,
    saved: Table,
    limits: Sequence[float],
    *,
    now: int | None = None,
    candidates: Sequence[int] | None = None,
) -> Grouping:
    """The shortest step, of equal ones the smallest k; ``now`` is kept unless another saves a hundredth of it.

    ``times`` with the transfers as last measured, one stage a rank; ``limits`` for what every rank may save.
    Candidates are the divisors of m where none are given. UserError if the memory does not hold even the smallest.
    """
    stages, count = len(times.forward), len(times.forward[0])
    wanted = sorted(candidates or (k for k in groupings(count) if count % k == 0))
    fitting = [k for k in wanted if overfull(k, saved, limits) is None]
    if not fitting:
        require_held(wanted[0], saved, limits)
    makespans = {k: evaluate(kfkb(stages, count, k), times).makespan for k in fitting}
    best = min(fitting, key=lambda k: (makespans[k], k))
    if now in makespans and makespans[best] > makespans[now] * (1 - WORTH):
        best = now
    return Grouping(best, makespans)


def require_held(k: int, saved: Table, limits: Sequence[float]) -> None:
    """UserError if a rank's memory does not hold kFkB with this k."""
    too_much = overfull(k, saved, limits)
    if too_much is not None:
        rank, needed = too_much
        raise UserError(GroupExceedsMemory(None, k, rank, f"{needed:.6g}", f"{limits[rank]:.6g}"))


def overfull(k: int, saved: Table, limits: Sequence[float]) -> tuple[int, float] | None:
    """The first rank that would hold too much, and what it would hold."""
    most = held(kfkb(len(saved), len(saved[0]), k), saved)
    return next(((rank, needed) for rank, needed in enumerate(most) if needed > limits[rank]), None)
