"""The numbers that a schedule is asked for, checked."""

from __future__ import annotations

from collections.abc import Sequence

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.errors import LimitsForOtherRanks, MemoryHoldsNoMicroBatch, NotPositive


def require_positive(**numbers: int) -> None:
    """UserError for any number below 1."""
    wrong = [NotPositive(None, what.replace("_", " "), given) for what, given in numbers.items() if given < 1]
    if wrong:
        raise UserError(*wrong)


def limits(most: int | Sequence[int], ranks: int) -> list[int]:
    """How many micro-batches each rank's memory holds. UserError for other ranks, or where one holds none."""
    held = [most] * ranks if isinstance(most, int) else list(most)
    if len(held) != ranks:
        raise UserError(LimitsForOtherRanks(None, len(held), ranks))
    wrong = [MemoryHoldsNoMicroBatch(None, rank) for rank, count in enumerate(held) if count < 1]
    if wrong:
        raise UserError(*wrong)
    return held
