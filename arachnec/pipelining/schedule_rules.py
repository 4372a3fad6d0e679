"""What every schedule obeys: each stage on one rank, each action once, none before what it needs, no deadlock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from arachnec.ir.diagnostic import Diagnostic, Span, UserError
from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    KINDS,
    PHASES,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    PipelineSchedule,
)
from arachnec.pipelining.errors import (
    ActionTooEarly,
    BackwardTwice,
    DeadlockedSchedule,
    EmptySchedule,
    MissingAction,
    MissingStage,
    RankWithoutActions,
    RepeatedAction,
    ScheduleForOthers,
    StageOnTwoRanks,
)
from arachnec.pipelining.evaluate import evaluate, uniform_times

Place = Callable[[int, int], Span | None]  # of a rank and the position in its order

# Of the kinds of work, what each needs on its own rank.
NEEDED: dict[Kind, Kind] = {BACKWARD: FORWARD, ACTIVATION_GRADIENT: FORWARD, WEIGHT_GRADIENT: ACTIVATION_GRADIENT}


def nowhere(rank: int, position: int) -> None:
    """The place of an action in a schedule that was never a text."""


def require_valid(
    schedule: PipelineSchedule, stages: int | None = None, micro_batches: int | None = None, place: Place = nowhere
) -> None:
    """UserError if the schedule breaks a rule, or is for other ``stages`` or ``micro_batches``."""
    if not any(schedule.orders):
        raise UserError(EmptySchedule(place(0, 0)))
    wrong: list[Diagnostic] = [
        RankWithoutActions(place(r, 0), r) for r, order in enumerate(schedule.orders) if not order
    ]
    wrong += _expected(schedule, stages, micro_batches, place)
    wrong = wrong or _misplaced(schedule, place) or _missing(schedule, place)
    if wrong:
        raise UserError(*wrong)
    try:
        evaluate(schedule, uniform_times(schedule.stages, schedule.micro_batches, 1, 1, 1))
    except UserError as error:
        raise UserError(*(_placed(diagnostic, schedule, place) for diagnostic in error.diagnostics)) from None


def _expected(
    schedule: PipelineSchedule, stages: int | None, micro_batches: int | None, place: Place
) -> list[Diagnostic]:
    given = (("stages", schedule.stages, stages), ("micro-batches", schedule.micro_batches, micro_batches))
    return [ScheduleForOthers(place(0, 0), what, has, want) for what, has, want in given if want not in (None, has)]


def _misplaced(schedule: PipelineSchedule, place: Place) -> list[Diagnostic]:
    """Actions that stand twice, on two ranks, as a whole and in halves, or before what they need.

    A stage on two ranks is told once, and a backward of both kinds.
    """
    wrong: list[Diagnostic] = []
    seen: dict[Action, tuple[int, int]] = {}
    rank_of: dict[int, int] = {}
    told: set[object] = set()
    for rank, order in enumerate(schedule.orders):
        own = frozenset(order)
        for position, action in enumerate(order):
            stage, kind, micro_batch = action
            at = place(rank, position)
            if rank_of.setdefault(stage, rank) != rank:
                if stage not in told:
                    wrong.append(StageOnTwoRanks(at, stage, rank_of[stage], rank))
                told.add(stage)
                continue
            if action in seen:
                wrong.append(RepeatedAction(at, str(action), _where(*seen[action])))
                continue
            seen[action] = (rank, position)
            if kind == FORWARD:
                continue
            whole = Action(stage, BACKWARD, micro_batch)
            halves = [Action(stage, half, micro_batch) for half in (ACTIVATION_GRADIENT, WEIGHT_GRADIENT)]
            others = halves if kind == BACKWARD else [whole]
            other = next((other for other in others if other in seen), None)
            if other is not None:
                if (stage, micro_batch) not in told:
                    wrong.append(BackwardTwice(at, stage, micro_batch, _where(*seen[other])))
                told.add((stage, micro_batch))
                continue
            needed = Action(stage, NEEDED[kind], micro_batch)
            if needed not in seen and needed in own:
                wrong.append(ActionTooEarly(at, rank, str(action), str(needed)))
    return wrong


def _missing(schedule: PipelineSchedule, place: Place) -> list[Diagnostic]:
    """Stages that no rank runs, and per stage the first forward or backward that is not there."""
    actions: dict[int, set[tuple[Kind, int]]] = {}
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(schedule.orders):
        for stage, kind, micro_batch in order:
            actions.setdefault(stage, set()).add((kind, micro_batch))
            rank_of[stage] = rank
    if len(actions) < schedule.stages:
        lost = next(stage for stage in range(schedule.stages) if stage not in actions)
        return [MissingStage(place(0, 0), lost, schedule.stages)]
    wrong: list[Diagnostic] = []
    for stage in sorted(actions):
        lacking = _first_lacking(actions[stage], schedule.micro_batches)
        if lacking is not None:
            kind, micro_batch = lacking
            word = str(Action(stage, kind, micro_batch))
            rank = rank_of[stage]
            wrong.append(MissingAction(place(rank, 0), stage, PHASES[kind], micro_batch, rank, word))
    return wrong


def _first_lacking(actions: set[tuple[Kind, int]], micro_batches: int) -> tuple[Kind, int] | None:
    """The first micro-batch without all it takes; at most one more than there are actions is looked at."""
    for micro_batch in range(micro_batches):
        forward, whole, activation, weight = ((kind, micro_batch) in actions for kind in KINDS)
        if not forward:
            return FORWARD, micro_batch
        if not (whole or activation or weight):
            return BACKWARD, micro_batch
        if not (whole or activation):
            return ACTIVATION_GRADIENT, micro_batch
        if not (whole or weight):
            return WEIGHT_GRADIENT, micro_batch
    return None


def _placed(diagnostic: Diagnostic, schedule: PipelineSchedule, place: Place) -> Diagnostic:
    """A deadlock at the action that has to move back."""
    if not isinstance(diagnostic, DeadlockedSchedule):
        return diagnostic
    order = [str(action) for action in schedule.orders[diagnostic.rank]]
    return replace(diagnostic, span=place(diagnostic.rank, order.index(diagnostic.holder)))


def _where(rank: int, position: int) -> str:
    return f"rank {rank}, as action {position + 1}"
