"""When every action of a schedule starts and ends, exactly.

A rank runs its actions one after another, each as soon as what it needs is there. Results travel beside compute, one
message at a time per link and direction, in the order in which they are made. So there is nothing to choose, and the
times follow: whole numbers and fractions stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from arachnec.ir.diagnostic import Mistake, Span, UserError, shown, user_error
from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Order,
    PipelineSchedule,
)
from arachnec.pipelining.errors import action_too_early, missing_action, missing_stage

Table = Sequence[Sequence[float]]
Place = Callable[[int, int], Span | None]  # of a rank and the position in its order


def nowhere(rank: int, position: int) -> None:
    """The place of an action in a schedule that was never a text."""


@dataclass(frozen=True)
class StageTimes:
    """How long things take, in any one unit: ``[stage][micro_batch]``, for transfers ``[cut][micro_batch]``.

    Cut c is between stage c and stage c + 1. Without ``backward`` a whole backward takes as long as its halves.
    Without ``send_forward`` or ``send_backward`` those transfers are free; inside a rank all are.
    """

    forward: Table
    activation_gradient: Table
    weight_gradient: Table
    backward: Table | None = None
    send_forward: Table = ()
    send_backward: Table = ()


@dataclass(frozen=True)
class Evaluation:
    """``start`` and ``end`` of every action, as they stand in the orders; ``busy`` is the work of every rank."""

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(times[-1] for times in self.end if times)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long every rank waits, from the first start to the last end anywhere."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The part of the makespan that ranks wait, on average."""
        return sum(self.idle) / (len(self.busy) * self.makespan)


def uniform_times(
    stages: int,
    micro_batches: int,
    forward: float,
    activation_gradient: float,
    weight_gradient: float,
    transfer: float = 0,
) -> StageTimes:
    """The same for every stage and micro-batch; ``transfer`` both ways."""

    def table(rows: int, value: float) -> Table:
        return ((value,) * micro_batches,) * rows

    cut = table(stages - 1, transfer) if transfer else ()
    return StageTimes(
        table(stages, forward),
        table(stages, activation_gradient),
        table(stages, weight_gradient),
        send_forward=cut,
        send_backward=cut,
    )


def evaluate(schedule: PipelineSchedule, times: StageTimes, place: Place = nowhere) -> Evaluation:
    """UserError if the schedule deadlocks, at the action that has to move back, or if the times are for another one."""
    stages, micro_batches = schedule.stages, schedule.micro_batches
    _require_times(times, stages, micro_batches)
    run = {action.stage for order in schedule.orders for action in order}
    if len(run) < stages:
        raise UserError(missing_stage(next(s for s in range(stages) if s not in run), stages))
    rank_of = schedule.placement
    whole = times.backward or [
        [i + w for i, w in zip(*rows, strict=True)]
        for rows in zip(times.activation_gradient, times.weight_gradient, strict=True)
    ]
    duration = {
        FORWARD: times.forward,
        BACKWARD: whole,
        ACTIVATION_GRADIENT: times.activation_gradient,
        WEIGHT_GRADIENT: times.weight_gradient,
    }
    # (stage, micro-batch): when the input is there; forward of the first and gradient of the last stage need none
    activation: dict[tuple[int, int], float] = {(0, m): 0 for m in range(micro_batches)}
    gradient: dict[tuple[int, int], float] = {(stages - 1, m): 0 for m in range(micro_batches)}
    forward_done: set[tuple[int, int]] = set()
    gradient_done: set[tuple[int, int]] = set()
    link_free: dict[tuple[int, int], float] = {}
    waiting: dict[tuple[bool, int, int], int] = {}  # (is a gradient, stage, micro-batch): the rank that needs it
    orders = schedule.orders
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    busy: list[float] = [0 for _ in orders]

    runnable = list(range(len(orders)))
    while runnable:
        rank = runnable.pop()
        order, start_of, end_of = orders[rank], starts[rank], ends[rank]
        now = end_of[-1] if end_of else 0
        for stage, kind, micro_batch in order[len(end_of) :]:
            key = (stage, micro_batch)
            if kind == FORWARD:
                there = activation.get(key)
                if there is None:
                    waiting[False, stage, micro_batch] = rank
                    break
                forward_done.add(key)
            elif kind == WEIGHT_GRADIENT:
                if key not in gradient_done:
                    break
                there = 0
            else:
                there = gradient.get(key)
                if there is None:
                    waiting[True, stage, micro_batch] = rank
                    break
                if key not in forward_done:
                    break
                gradient_done.add(key)
            start = there if there > now else now
            length = duration[kind][stage][micro_batch]
            now = start + length
            start_of.append(start)
            end_of.append(now)
            busy[rank] += length
            if kind == WEIGHT_GRADIENT:
                continue
            is_gradient = kind != FORWARD
            target = stage - 1 if is_gradient else stage + 1
            if not 0 <= target < stages:
                continue
            arrival = now
            if rank_of[target] != rank:
                sends = times.send_backward if is_gradient else times.send_forward
                if sends:
                    link = (rank, rank_of[target])
                    arrival = max(now, link_free.get(link, now)) + sends[min(stage, target)][micro_batch]
                    link_free[link] = arrival
            (gradient if is_gradient else activation)[target, micro_batch] = arrival
            waiter = waiting.pop((is_gradient, target, micro_batch), None)
            if waiter is not None:
                runnable.append(waiter)

    blocked = {r: order[len(ends[r])] for r, order in enumerate(orders) if len(ends[r]) < len(order)}
    if blocked:
        raise UserError(_why_blocked(blocked, rank_of, forward_done, gradient_done, schedule, place))
    return Evaluation(tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(busy))


def _require_times(times: StageTimes, stages: int, micro_batches: int) -> None:
    """Every table has a row for every stage (or cut), and every row a number for every micro-batch."""
    named: list[tuple[str, Table, int]] = [
        ("forward times", times.forward, stages),
        ("activation gradient times", times.activation_gradient, stages),
        ("weight gradient times", times.weight_gradient, stages),
        *([("backward times", times.backward, stages)] if times.backward else []),
        *([("forward transfer times", times.send_forward, stages - 1)] if times.send_forward else []),
        *([("backward transfer times", times.send_backward, stages - 1)] if times.send_backward else []),
    ]
    for what, table, rows in named:
        if len(table) != rows or any(len(row) != micro_batches for row in table):
            given = f"{len(table)} x {len(table[0]) if table else 0}"
            raise user_error(
                f"{what} are given for {given}, but the schedule has {rows} x {micro_batches}",
                help="give one number for every stage and micro-batch, and for every cut and micro-batch",
            )


def _why_blocked(
    blocked: dict[int, Action],
    rank_of: Sequence[int],
    forward_done: set[tuple[int, int]],
    gradient_done: set[tuple[int, int]],
    schedule: PipelineSchedule,
    place: Place,
) -> Mistake:
    """What each blocked rank waits for, followed until a rank comes again."""
    path: list[int] = []
    needs: dict[int, Action] = {}
    rank = min(blocked)
    while rank not in path:
        path.append(rank)
        stage, kind, micro_batch = action = blocked[rank]
        if kind == WEIGHT_GRADIENT:
            return action_too_early(action, Action(stage, ACTIVATION_GRADIENT, micro_batch), rank)
        if kind != FORWARD and (stage, micro_batch) not in forward_done:
            return action_too_early(action, Action(stage, FORWARD, micro_batch), rank)
        awaited = stage - 1 if kind == FORWARD else stage + 1
        needs[rank] = Action(awaited, kind, micro_batch)
        rank = rank_of[awaited]
        if rank not in blocked:
            return missing_action(needs[path[-1]], rank)
    cycle = path[path.index(rank) :]
    waits = ", ".join(f"rank {r} waits at `{blocked[r]}` for `{needs[r]}`" for r in cycle)
    return Mistake(
        place(rank, schedule.orders[rank].index(blocked[rank])),
        f"the schedule deadlocks: {shown(waits)}",
        label="never runs",
        help=f"move `{needs[cycle[-1]]}` before `{blocked[rank]}` on rank {rank}",
    )


def held(schedule: PipelineSchedule, saved: Table) -> tuple[float, ...]:
    """The most that every rank holds at once, of ``saved[stage][micro_batch]``.

    A forward saves, a whole backward or a weight gradient releases. When does not matter: a rank's actions follow each
    other.
    """
    return tuple(_most(order, saved) for order in schedule.orders)


def _most(order: Order, saved: Table) -> float:
    now: float = 0
    most: float = 0
    for stage, kind, micro_batch in order:
        if kind == FORWARD:
            now += saved[stage][micro_batch]
            most = max(most, now)
        elif kind != ACTIVATION_GRADIENT:
            now -= saved[stage][micro_batch]
    return most
