"""Schedules that take a forward and a backward in turn: GPipe, 1F1B, kFkB, DAPPLE's.

They differ in how many forwards a rank runs before its first backward, and in how many micro-batches go as one.
One stage a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal

from arachnec.ir.diagnostic import UserError
from arachnec.pipelining.action import BACKWARD, FORWARD, Action, Kind, Order, PipelineSchedule
from arachnec.pipelining.arguments import limits, require_positive
from arachnec.pipelining.errors import UnknownWarmUpPolicy

WarmUp = Literal["A", "B"]


def gpipe(stages: int, micro_batches: int) -> PipelineSchedule:
    """All forwards, then all backwards (Huang et al., 1811.06965). Every rank holds all micro-batches."""
    return kfkb(stages, micro_batches, k=micro_batches)


def one_f_one_b(stages: int, micro_batches: int) -> PipelineSchedule:
    """1F1B (PipeDream-flush, 2006.09503): rank r holds at most p - r micro-batches."""
    return kfkb(stages, micro_batches, k=1)


def kfkb(stages: int, micro_batches: int, k: int) -> PipelineSchedule:
    """1F1B with ``k`` micro-batches in the place of one, the last group smaller (Ada-Grouper, 2303.01675)."""
    require_positive(stages=stages, micro_batches=micro_batches, k=k)
    return _schedule(stages, micro_batches, k, [stages - rank for rank in range(stages)])


def dapple(
    stages: int, micro_batches: int, policy: WarmUp = "A", most: int | Sequence[int] | None = None
) -> PipelineSchedule:
    """DAPPLE's early backward (2007.01045, section 4): K forwards, then backward and forward strictly in turn.

    Policy A has K = min(p - r, D), policy B, for slow links, K = min(2 (p - r) - 1, D). D is how many micro-batches
    the memory of a rank holds: ``most``, for all ranks or one number for each. UserError where that is none.
    """
    require_positive(stages=stages, micro_batches=micro_batches)
    return PipelineSchedule(tuple(order for (order,) in dapple_in_turns([1] * stages, micro_batches, policy, most)))


def dapple_in_turns(
    replicas: Sequence[int], micro_batches: int, policy: WarmUp = "A", most: int | Sequence[int] | None = None
) -> tuple[tuple[Order, ...], ...]:
    """DAPPLE's early backward for stages of unequal replica counts: orders by stage and replica.

    Micro-batch m runs on replica m mod r of a stage that has r (PipeDream's round robin, 1806.03377, section 3.3).
    ``most`` micro-batches fit on a rank of each stage. With one replica each these are the orders of ``dapple``.
    """
    require_positive(micro_batches=micro_batches, **{"the fewest replicas": min(replicas, default=0)})
    ahead = warm_up(replicas, policy, most)

    def order(stage: int, replica: int) -> Order:
        own = range(replica, micro_batches, replicas[stage])
        forwards, backwards = ([Action(stage, kind, m) for m in own] for kind in (FORWARD, BACKWARD))
        return in_turn(forwards, backwards, min(ahead[stage], len(own)) - 1) if own else ()

    return tuple(tuple(order(stage, replica) for replica in range(r)) for stage, r in enumerate(replicas))


def warm_up(replicas: Sequence[int], policy: WarmUp, most: int | Sequence[int] | None) -> list[int]:
    """How many micro-batches go forward on a replica of each stage before the first goes backward.

    Policy A: as many as are under way in the stages from this one on, one a replica. Policy B, for slow links: twice
    as many, less one. Never more than the memory holds; nor more than the stages before let through, without which
    they would wait for each other.
    """
    if policy not in ("A", "B"):
        raise UserError(UnknownWarmUpPolicy(None, str(policy)))
    under_way = [-(-sum(replicas[stage:]) // own) for stage, own in enumerate(replicas)]
    wanted = under_way if policy == "A" else [2 * count - 1 for count in under_way]
    held = wanted if most is None else limits(most, len(replicas))
    ahead = [min(wanted[0], held[0])]
    through = ahead[0] * replicas[0]  # micro-batches that go forward, on all replicas, before the first goes backward
    for own, enough, room in zip(replicas[1:], wanted[1:], held[1:], strict=True):
        ahead.append(min(enough, room, -(-through // own)))
        through = min(through, ahead[-1] * own)
    return ahead


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Order:
    """``ahead`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return (*forwards[:ahead], *chain.from_iterable(pairs), *backwards[max(0, len(forwards) - ahead) :])


def _schedule(stages: int, micro_batches: int, k: int, ahead_on: Sequence[int]) -> PipelineSchedule:
    """``ahead_on[r]`` groups of ``k`` go forward on rank r before the first goes backward."""
    groups = [range(first, min(first + k, micro_batches)) for first in range(0, micro_batches, k)]

    def order(rank: int) -> Order:
        if k == 1:  # the common case, without a tuple for every micro-batch
            forwards = [Action(rank, FORWARD, m) for m in range(micro_batches)]
            backwards = [Action(rank, BACKWARD, m) for m in range(micro_batches)]
            return in_turn(forwards, backwards, min(ahead_on[rank], micro_batches) - 1)
        ahead = min(ahead_on[rank], len(groups)) - 1

        def run(kind: Kind, group: range) -> list[Action]:
            return [Action(rank, kind, m) for m in group]

        turns = [run(FORWARD, group) for group in groups[:ahead]]
        for done, group in enumerate(groups[ahead:]):
            turns += [run(FORWARD, group), run(BACKWARD, groups[done])]
        turns += [run(BACKWARD, group) for group in groups[len(groups) - ahead :]]
        return tuple(chain.from_iterable(turns))

    return PipelineSchedule(tuple(order(rank) for rank in range(stages)))
