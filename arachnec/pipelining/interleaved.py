"""Interleaved 1F1B: several stages a rank, v apart in every p (Narayanan et al., 2104.04473).

Micro-batches go in rounds. In a round a rank takes all micro-batches through its first stage, then through its next.
"""

from __future__ import annotations

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.action import BACKWARD, FORWARD, Action, Kind, Order, PipelineSchedule
from arachnec.pipelining.arguments import require_positive
from arachnec.pipelining.errors import UnevenRounds
from arachnec.pipelining.one_f_one_b import in_turn


def interleaved_1f1b(ranks: int, micro_batches: int, v: int) -> PipelineSchedule:
    """``v`` stages a rank: stage s on rank s mod ``ranks``.

    As torch, it wants m to be a multiple of the number of rounds, max(1, m // p). With v = 1 it is not 1F1B: it runs
    twice as many forwards ahead. UserError for other m.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches, v=v)
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise UserError(UnevenRounds(None, micro_batches, ranks, -(-micro_batches // ranks) * ranks))
    size = micro_batches // rounds

    def actions(rank: int, kind: Kind, chunks: range) -> list[Action]:
        return [
            Action(chunk * ranks + rank, kind, micro_batch)
            for first in range(0, micro_batches, size)
            for chunk in chunks
            for micro_batch in range(first, first + size)
        ]

    def order(rank: int) -> Order:
        ahead = min((v - 1) * size + 2 * (ranks - 1 - rank), v * micro_batches)
        return in_turn(actions(rank, FORWARD, range(v)), actions(rank, BACKWARD, range(v)[::-1]), ahead)

    return PipelineSchedule(tuple(order(rank) for rank in range(ranks)))
