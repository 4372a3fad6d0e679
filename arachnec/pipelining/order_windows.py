"""Z3 on windows of a schedule: the best order of up to 64 actions that follow each other, all others kept, proved.

A window is everything that begins in a span of time: jobs of ``solver.z3_proof``, each on its rank. What a rank holds
when a forward begins is a sum over which of two actions is first. Before and behind the window stand the heads and
tails that the rest of the schedule leaves. Where the window is the whole schedule, the proof is that of the optimum.

Whole numbers are taken as they are; other times are rounded to a millionth of the makespan first, and it is of the
rounded times that anything is proved. Queues on links are not modelled: they only lengthen a schedule, and one is only
taken if the exact evaluation finds it shorter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from arachnec.pipelining.action import ACTIVATION_GRADIENT, FORWARD, WEIGHT_GRADIENT, Action, Kind, PipelineSchedule
from arachnec.pipelining.evaluate import Evaluation, StageTimes, Table, evaluate, held
from arachnec.pipelining.order_problem import OrderProblem, one_rank_bound
from arachnec.solver.problem import Effort
from arachnec.solver.z3_proof import Answer, Boolean, Model

LARGEST_WINDOW = 64
TICKS = 1_000_000  # of a makespan that is no whole number


@dataclass(frozen=True)
class Windowed:
    """The schedule, its makespan, how many windows were solved, and of how many it is proved that they are best.

    ``optimal``: a window was the whole schedule, and proved.
    """

    schedule: PipelineSchedule
    makespan: float
    windows: int
    proved: int
    optimal: bool


def improve_windows(
    problem: OrderProblem, schedule: PipelineSchedule, effort: Effort, *, size: int = LARGEST_WINDOW
) -> Windowed:
    """Every window of ``size`` actions once, each half a window later than the last; ``effort`` for each of them."""
    whole = _whole(problem, evaluate(schedule, problem.times).makespan)
    evaluation = evaluate(schedule, whole.times)
    actions = sum(map(len, schedule.orders))
    windows = proved = 0
    for first in range(0, max(1, actions - size // 2), size // 2):
        windows += 1
        schedule, evaluation, certain = _solve(whole, schedule, evaluation, first, size, effort)
        proved += certain
    makespan = evaluate(schedule, problem.times).makespan
    return Windowed(schedule, makespan, windows, proved, proved == 1 and actions <= size)


def _whole(problem: OrderProblem, makespan: float) -> OrderProblem:
    """The problem in whole numbers: as it is, or its times in ticks and its sizes rounded against us."""
    times = problem.times
    tables: list[Table] = [times.forward, times.activation_gradient, times.weight_gradient, problem.backward]
    tables += [times.send_forward, times.send_backward]
    exact = all(isinstance(time, int) for table in tables for row in table for time in row)
    exact = exact and all(time > 0 for table in tables[:4] for row in table for time in row)

    def whole(time: float, least: int) -> float:
        return time if exact else max(least, round(time * TICKS / makespan))

    ticks = [[[whole(time, k < 4) for time in row] for row in table] for k, table in enumerate(tables)]
    saved = [[math.ceil(size) for size in row] for row in problem.saved]
    return OrderProblem(StageTimes(*ticks), saved, [math.floor(limit) for limit in problem.limits], problem.placement)


def _solve(
    problem: OrderProblem,
    schedule: PipelineSchedule,
    evaluation: Evaluation,
    first: int,
    size: int,
    effort: Effort,
) -> tuple[PipelineSchedule, Evaluation, bool]:
    """The window's actions in better orders until the effort is spent; and whether there is provably no better one."""
    while True:
        window = _window(schedule, evaluation, first, size)
        question = _Question(problem, schedule, evaluation, window)
        answer = question.check(effort)
        if answer is not Answer.POSSIBLE:
            return schedule, evaluation, answer is Answer.IMPOSSIBLE
        better = question.schedule()
        after = evaluate(better, problem.times)
        fits = all(a <= b for a, b in zip(held(better, problem.saved), problem.limits, strict=True))
        if not fits or after.makespan >= evaluation.makespan:  # better only without queues
            return schedule, evaluation, False
        schedule, evaluation = better, after


def _window(schedule: PipelineSchedule, evaluation: Evaluation, first: int, size: int) -> list[range]:
    """Per rank the positions of ``size`` actions, from the ``first`` in order of their starts."""
    begins = sorted(
        (start, end, rank, position)
        for rank, (starts, ends) in enumerate(zip(evaluation.start, evaluation.end, strict=True))
        for position, (start, end) in enumerate(zip(starts, ends, strict=True))
    )
    chosen = [(rank, position) for *_, rank, position in begins[first : first + size]]
    ranges = []
    for rank in range(len(schedule.orders)):
        own = [position for other, position in chosen if other == rank]
        ranges.append(range(min(own), max(own) + 1) if own else range(0))
    return ranges


class _Question(Model):
    """Whether the window's actions have an order with a makespan of at least one tick less."""

    def __init__(
        self,
        problem: OrderProblem,
        schedule: PipelineSchedule,
        evaluation: Evaluation,
        window: list[range],
    ) -> None:
        self.problem, self.given, self.window = problem, schedule, window
        self.inside = [[order[k] for k in own] for order, own in zip(schedule.orders, window, strict=True)]
        flat = [action for own in self.inside for action in own]
        super().__init__(len(flat), seed=0)
        self.number = {action: number for number, action in enumerate(flat)}
        self.before: dict[tuple[Action, Action], Boolean] = {}
        self.heads, self.tails = self._surroundings(evaluation)
        self.horizon = evaluation.makespan - 1
        for action in flat:
            j = self.number[action]
            self.require(self.end[j] == self.start[j] + self._length(action))
            self.require(self.start[j] >= self.heads[action])
            self.require(self.end[j] <= self.horizon - self.tails[action])
            needed, delay = self._needed(action)
            if needed in self.number:
                self.require(self.start[j] >= self.end[self.number[needed]] + delay)
        for rank, own in enumerate(self.inside):
            if one_rank_bound([(self.heads[a], self._length(a), self.tails[a]) for a in own]) > self.horizon:
                self.require(False)
            self._order(own)
            self._memory(rank, own)

    def _length(self, action: Action) -> float:
        times, problem = self.problem.times, self.problem
        table = {FORWARD: times.forward, ACTIVATION_GRADIENT: times.activation_gradient}
        table |= {WEIGHT_GRADIENT: times.weight_gradient}
        return table.get(action.kind, problem.backward)[action.stage][action.micro_batch]

    def _needed(self, action: Action) -> tuple[Action, float]:
        """What this one gets its input from, and how long that travels."""
        stage, kind, micro_batch = action
        times, placement = self.problem.times, self.problem.placement
        if kind == WEIGHT_GRADIENT:
            return Action(stage, ACTIVATION_GRADIENT, micro_batch), 0
        last = self.problem.stages - 1
        if kind != FORWARD and stage == last:
            return Action(stage, FORWARD, micro_batch), 0
        other = stage - 1 if kind == FORWARD else stage + 1
        sends = times.send_forward if kind == FORWARD else times.send_backward
        travels = sends and other >= 0 and placement[other] != placement[stage]
        return Action(other, kind, micro_batch), sends[min(stage, other)][micro_batch] if travels else 0

    def _surroundings(self, evaluation: Evaluation) -> tuple[dict[Action, float], dict[Action, float]]:
        """The least time before the start and behind the end of each action of the window, by what is outside it."""
        end = {
            action: time
            for order, times in zip(self.given.orders, evaluation.end, strict=True)
            for action, time in zip(order, times, strict=True)
        }
        behind = self._behind(evaluation)
        heads: dict[Action, float] = {}
        tails: dict[Action, float] = {}
        needing: dict[Action, list[tuple[Action, float]]] = {}
        for action in end:
            needed, delay = self._needed(action)
            needing.setdefault(needed, []).append((action, delay))
        for rank, own in enumerate(self.inside):
            order, places = self.given.orders[rank], self.window[rank]
            for action in own:
                needed, delay = self._needed(action)
                ready = end[needed] + delay if needed in end and needed not in self.number else 0
                heads[action] = max(ready, evaluation.end[rank][places.start - 1] if places.start else 0)
                tail = behind[order[places.stop]] if places.stop < len(order) else 0
                later = [delay + behind[n] for n, delay in needing.get(action, []) if n not in self.number]
                tails[action] = max([tail, *later])
        # along what is needed inside the window
        for action in sorted(heads, key=end.__getitem__):
            needed, delay = self._needed(action)
            if needed in heads:
                heads[action] = max(heads[action], heads[needed] + self._length(needed) + delay)
        for action in sorted(tails, key=end.__getitem__, reverse=True):
            needed, delay = self._needed(action)
            if needed in tails:
                tails[needed] = max(tails[needed], delay + self._length(action) + tails[action])
        return heads, tails

    def _behind(self, evaluation: Evaluation) -> dict[Action, float]:
        """From the start of each action to the end of the schedule, at least, orders kept."""
        after: dict[Action, list[tuple[Action, float]]] = {}
        ends = []
        for order, times in zip(self.given.orders, evaluation.end, strict=True):
            for position, action in enumerate(order):
                ends.append((times[position], action))
                needed, delay = self._needed(action)
                after.setdefault(needed, []).append((action, delay))
                if position:
                    after.setdefault(order[position - 1], []).append((action, 0))
        behind: dict[Action, float] = {}
        for _, action in sorted(ends, reverse=True):  # no length is 0, so what comes behind ends later
            later = max((delay + behind[n] for n, delay in after.get(action, [])), default=0)
            behind[action] = self._length(action) + later
        return behind

    def _order(self, own: Sequence[Action]) -> None:
        """One action at a time. Pairs whose order is known, or which could not end in time the other way, are fixed."""
        for a, b in combinations(own, 2):
            self.before[a, b], self.before[b, a] = self.apart(self.number[a], self.number[b])
            same = (a.stage, a.micro_batch) == (b.stage, b.micro_batch)
            for earlier, later in ((a, b), (b, a)):
                between = self._length(earlier) + self._length(later)
                if self.heads[later] + between + self.tails[earlier] > self.horizon or (same and earlier == a):
                    self.require(self.before[earlier, later])

    def _memory(self, rank: int, own: Sequence[Action]) -> None:
        """When a forward begins, it and what is held by others is within the limit."""
        base = _held_at(self.given.orders[rank][: self.window[rank].start], self.problem)
        limit = math.floor(self.problem.limits[rank])
        for action in own:
            if action.kind != FORWARD:
                continue
            sizes = []
            room = limit - math.ceil(base) - self._size(action)
            for other in own:
                if other == action or other.kind == ACTIVATION_GRADIENT:
                    continue
                size = self._size(other)
                if other.kind == FORWARD:
                    sizes.append((self.before[other, action], size))
                else:  # held unless released before
                    sizes.append((self.before[action, other], size))
                    room += size
            if room < 0:
                self.require(False)
            elif sum(size for _, size in sizes) > room:
                self.at_most(sizes, room)

    def _size(self, action: Action) -> int:
        return math.ceil(self.problem.saved[action.stage][action.micro_batch])

    def schedule(self) -> PipelineSchedule:
        """The orders of the starts that were found."""
        starts = self.starts()
        orders = []
        for rank, own in enumerate(self.inside):
            ranked = sorted(own, key=lambda action: starts[self.number[action]])
            order, places = self.given.orders[rank], self.window[rank]
            orders.append((*order[: places.start], *ranked, *order[places.stop :]))
        return PipelineSchedule(tuple(orders))


def _held_at(order: Sequence[Action], problem: OrderProblem) -> float:
    """What is held behind these actions."""
    released: tuple[Kind, ...] = ("B", "W")
    held = 0.0
    for stage, kind, micro_batch in order:
        held += problem.saved[stage][micro_batch] * ((kind == FORWARD) - (kind in released))
    return held
