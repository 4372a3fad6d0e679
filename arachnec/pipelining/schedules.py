"""Pipeline schedules in closed form. In: ranks, stages and micro-batches. Out: the actions of every rank, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from arachnec.ir.diagnostic import Mistake, UserError, user_error
from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    Order,
    PipelineSchedule,
)


def require_positive(**numbers: int) -> None:
    """UserError for any number below 1."""
    wrong = [
        Mistake(
            None,
            f"a pipeline schedule with {what.replace('_', ' ')} = {given}",
            help="give a whole number of at least 1",
        )
        for what, given in numbers.items()
        if given < 1
    ]
    if wrong:
        raise UserError(*wrong)


def limits(most: int | Sequence[int], ranks: int) -> list[int]:
    """How many micro-batches each rank's memory holds. UserError for other ranks, or where one holds none."""
    held = [most] * ranks if isinstance(most, int) else list(most)
    if len(held) != ranks:
        raise user_error(
            f"memory limits for {len(held)} ranks, but there are {ranks}", help="give one limit for every rank"
        )
    remedy = "use smaller micro-batches, more stages, or recompute more blocks"
    wrong = [
        Mistake(None, f"the memory of rank {rank} holds no micro-batch", help=remedy)
        for rank, count in enumerate(held)
        if count < 1
    ]
    if wrong:
        raise UserError(*wrong)
    return held


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
    groups = [range(first, min(first + k, micro_batches)) for first in range(0, micro_batches, k)]

    def order(rank: int) -> Order:
        if k == 1:  # the common case, without a tuple for every micro-batch
            forwards = [Action(rank, FORWARD, m) for m in range(micro_batches)]
            backwards = [Action(rank, BACKWARD, m) for m in range(micro_batches)]
            return in_turn(forwards, backwards, min(stages - rank, micro_batches) - 1)
        ahead = min(stages - rank, len(groups)) - 1

        def run(kind: Kind, group: range) -> list[Action]:
            return [Action(rank, kind, m) for m in group]

        turns = [run(FORWARD, group) for group in groups[:ahead]]
        for done, group in enumerate(groups[ahead:]):
            turns += [run(FORWARD, group), run(BACKWARD, groups[done])]
        turns += [run(BACKWARD, group) for group in groups[len(groups) - ahead :]]
        return tuple(chain.from_iterable(turns))

    return PipelineSchedule(tuple(order(rank) for rank in range(stages)))


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
        raise user_error(
            f"unknown warm-up policy `{policy}`",
            help="policies are A (stages behind and this one) and B (twice as many, for slow links)",
        )
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


def interleaved_1f1b(ranks: int, micro_batches: int, v: int) -> PipelineSchedule:
    """``v`` stages a rank: stage s on rank s mod ``ranks``.

    As torch, it wants m to be a multiple of the number of rounds, max(1, m // p). With v = 1 it is not 1F1B: it runs
    twice as many forwards ahead. UserError for other m.

    Narayanan et al., 2104.04473. Micro-batches go in rounds. In a round a rank takes all micro-batches through its
    first stage, then through its next.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches, v=v)
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        fitting = -(-micro_batches // ranks) * ranks
        raise user_error(
            f"{micro_batches} micro-batches cannot be interleaved on {ranks} ranks",
            help=f"interleaving goes in rounds of equal size: give {fitting} micro-batches, or use 1f1b",
        )
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


def zb_h1(stages: int, micro_batches: int) -> PipelineSchedule:
    """Rank r goes p - 1 - r forwards ahead and keeps r weight gradients back, so every rank holds p micro-batches."""
    require_positive(stages=stages, micro_batches=micro_batches)
    return PipelineSchedule(tuple(_split_order(r, micro_batches, stages - 1 - r, r) for r in range(stages)))


def zb_h2(stages: int, micro_batches: int) -> PipelineSchedule:
    """Twice as far ahead, and twice as many kept back: every rank holds up to 2p - 1 micro-batches.

    With equal times no rank idles between its own first and last action. A step that starts and ends together is no
    shorter for it.
    """
    require_positive(stages=stages, micro_batches=micro_batches)
    return PipelineSchedule(tuple(_split_order(r, micro_batches, 2 * (stages - 1 - r), 2 * r) for r in range(stages)))


def _split_order(stage: int, micro_batches: int, ahead: int, back: int) -> Order:
    """``ahead`` forwards, then forward and activation gradient in turn; each weight gradient ``back`` turns later.

    Zero bubble (Qi et al., 2401.10241, sections 2.3 and 3): other ranks wait for activation gradients; weight gradients
    fill the bubbles.
    """
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


def zb_v(ranks: int, micro_batches: int) -> PipelineSchedule:
    """2 ``ranks`` stages; a rank holds at most 2p of them at once. Best for equal F, B and W, and m >= 2p.

    Zero bubble in the memory of 1F1B (Qi et al., 2401.10241, section 6). Rank r has stage r and stage 2p - 1 - r, a V,
    so the last rank turns round at once.
    """
    require_positive(ranks=ranks, micro_batches=micro_batches)
    return PipelineSchedule(tuple(_v_order(rank, ranks, micro_batches) for rank in range(ranks)))


def _v_order(rank: int, ranks: int, micro_batches: int) -> Order:
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
