"""Schedules in the CSV of ``torch.distributed.pipelining``, and the rules that every schedule obeys.

One row is a rank, one cell an action; cells may be empty. What torch derives itself when it lowers a schedule, and
arachnec likewise, is read too: sends, receives, unshards, reshards and ``REDUCE_GRAD`` are checked as words and left
out. ``(0F4;7B0)OVERLAP_F_B`` is DualPipeV's pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from arachnec.ir.diagnostic import Mistake, Span, UserError, user_error
from arachnec.ir.limits import LARGEST_DATA, MOST_CELLS, MOST_SCHEDULE_RANKS
from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    Order,
    PipelineSchedule,
    parse_action,
)
from arachnec.pipelining.errors import action_too_early, missing_action, missing_stage
from arachnec.pipelining.evaluate import Place, evaluate, nowhere, uniform_times

# Of the kinds of work, what each needs on its own rank.
NEEDED: dict[Kind, Kind] = {BACKWARD: FORWARD, ACTIVATION_GRADIENT: FORWARD, WEIGHT_GRADIENT: ACTIVATION_GRADIENT}


def require_valid(
    schedule: PipelineSchedule, stages: int | None = None, micro_batches: int | None = None, place: Place = nowhere
) -> None:
    """UserError if the schedule breaks a rule, or is for other ``stages`` or ``micro_batches``."""
    if not any(schedule.orders):
        raise user_error(
            "the schedule has no action",
            help="write one row of actions for every rank, as in `0F0,0B0`",
            span=place(0, 0),
        )
    wrong = [
        Mistake(
            place(rank, 0),
            f"rank {rank} has no action",
            label="an empty row",
            help="give the rank a stage, or remove its row",
        )
        for rank, order in enumerate(schedule.orders)
        if not order
    ]
    wrong += _expected(schedule, stages, micro_batches, place)
    wrong = wrong or _misplaced(schedule, place) or _missing(schedule, place)
    if wrong:
        raise UserError(*wrong)
    evaluate(schedule, uniform_times(schedule.stages, schedule.micro_batches, 1, 1, 1), place)


def _expected(schedule: PipelineSchedule, stages: int | None, micro_batches: int | None, place: Place) -> list[Mistake]:
    given = (("stages", schedule.stages, stages), ("micro-batches", schedule.micro_batches, micro_batches))
    return [
        Mistake(
            place(0, 0),
            f"the schedule is for {has} {what}, but there are {want}",
            help=f"give a schedule for {want} {what}, or change the number of {what} to {has}",
        )
        for what, has, want in given
        if want not in (None, has)
    ]


def _misplaced(schedule: PipelineSchedule, place: Place) -> list[Mistake]:
    """Actions that stand twice, on two ranks, as a whole and in halves, or before what they need.

    A stage on two ranks is told once, and a backward of both kinds.
    """
    wrong: list[Mistake] = []
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
                    first = rank_of[stage]
                    title = f"stage {stage} is on rank {first} and on rank {rank}"
                    remedy = "the parameters of a stage are on one rank: move its actions to one row"
                    wrong.append(Mistake(at, title, label=f"rank {first} runs this stage", help=remedy))
                told.add(stage)
                continue
            if action in seen:
                before = f"stands before this on {_where(*seen[action])}"
                remedy = "every stage runs forward and backward of a micro-batch once: remove one"
                wrong.append(Mistake(at, f"`{action}` stands twice", label=before, help=remedy))
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
                    title = f"stage {stage} has both a whole and a split backward of micro-batch {micro_batch}"
                    label = f"the split half; the whole one is on {_where(*seen[other])}"
                    wrong.append(Mistake(at, title, label=label, help="keep B, or both I and W"))
                told.add((stage, micro_batch))
                continue
            needed = Action(stage, NEEDED[kind], micro_batch)
            if needed not in seen and needed in own:
                wrong.append(action_too_early(action, needed, rank, at))
    return wrong


def _missing(schedule: PipelineSchedule, place: Place) -> list[Mistake]:
    """Stages that no rank runs, and per stage the first forward or backward that is not there."""
    actions: dict[int, set[tuple[Kind, int]]] = {}
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(schedule.orders):
        for stage, kind, micro_batch in order:
            actions.setdefault(stage, set()).add((kind, micro_batch))
            rank_of[stage] = rank
    if len(actions) < schedule.stages:
        lost = next(stage for stage in range(schedule.stages) if stage not in actions)
        return [missing_stage(lost, schedule.stages, place(0, 0))]
    wrong = []
    for stage in sorted(actions):
        lacking = _first_lacking(actions[stage], schedule.micro_batches)
        if lacking is not None:
            rank = rank_of[stage]
            wrong.append(missing_action(Action(stage, *lacking), rank, place(rank, 0)))
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


def _where(rank: int, position: int) -> str:
    return f"rank {rank}, as action {position + 1}"


_DERIVED = re.compile(r"[0-9]{1,9}(?:(?:SEND|RECV)_[FB][0-9]{1,9}|UNSHARD|RESHARD|REDUCE_GRAD)")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def to_csv(schedule: PipelineSchedule) -> str:
    """What torch reads back as ``compute_only``: no ``REDUCE_GRAD``, which it writes and refuses to read."""
    return "".join(",".join(_cells(order, schedule.overlapped)) + "\r\n" for order in schedule.orders)


def read_csv(path: Path, stages: int | None = None, micro_batches: int | None = None) -> PipelineSchedule:
    """``from_csv`` of a file. UserError where it is missing, no text, or larger than any schedule."""
    if not path.is_file():
        raise user_error(
            f"there is no file of orders {path}",
            help="give the path of a CSV as torch.distributed.pipelining writes it, a row for every rank",
        )
    _require_size("bytes", path.stat().st_size, LARGEST_DATA)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        remedy = "give a CSV as torch.distributed.pipelining writes it, in UTF-8"
        raise user_error(f"{path} is no text", help=remedy) from None
    return from_csv(text, str(path), stages, micro_batches)


def from_csv(text: str, file: str, stages: int | None = None, micro_batches: int | None = None) -> PipelineSchedule:
    """The schedule of a CSV. UserError for words that are no action and for schedules that break a rule.

    ``file`` names the text in errors. With ``stages`` or ``micro_batches`` the schedule must be for that many.
    """
    rows = text.splitlines()
    _require_size("rows", len(rows), MOST_SCHEDULE_RANKS)
    _require_size("cells", sum(row.count(",") + 1 for row in rows), MOST_CELLS)
    orders: list[Order] = []
    cells: list[list[tuple[int, int]]] = []  # first and last column of every action's cell
    overlapped: set[Action] = set()
    wrong = []
    for number, row in enumerate(rows, 1):
        order: list[Action] = []
        columns: list[tuple[int, int]] = []
        for column, word in _words(row):
            actions = _actions(word)
            if actions is None:
                title = f"`{word[:40]}` is no action of a pipeline schedule"
                remedy = "write stage, kind and micro-batch, as in `2F0`; kinds are F, B, I and W"
                span = Span(file, number, column, number, column + len(word), text)
                wrong.append(Mistake(span, title, label="not an action", help=remedy))
                continue
            order += actions
            columns += [(column, column + len(word))] * len(actions)
            overlapped.update(actions[:1] if len(actions) == 2 else ())
        orders.append(tuple(order))
        cells.append(columns)
    if wrong:
        raise UserError(*wrong)
    schedule = PipelineSchedule(tuple(orders), frozenset(overlapped))

    def place(rank: int, position: int) -> Span:
        """Of an action; of its row where the row has none; of the text's beginning where there is no row."""
        if rank >= len(cells):
            return Span(file, 1, 1, 1, 2, text)
        first, last = cells[rank][position] if cells[rank] else (1, 2)
        return Span(file, rank + 1, first, rank + 1, last, text)

    require_valid(schedule, stages, micro_batches, place)
    return schedule


def _require_size(what: str, given: int, most: int) -> None:
    if given > most:
        raise user_error(
            f"the schedule has {given} {what}, more than {most}",
            help="a schedule has one row for every rank and one cell for every action",
        )


def _words(row: str) -> Iterator[tuple[int, str]]:
    """Every cell that is not empty and the column where it starts, from 1."""
    column = 1
    for cell in row.split(","):
        word = cell.strip().strip('"').strip()
        if word:
            yield column + cell.index(word), word
        column += len(cell) + 1


def _actions(word: str) -> list[Action] | None:
    """The one or two actions of a cell; none for what is derived; None if it is no action."""
    if _DERIVED.fullmatch(word):
        return []
    pair = _OVERLAP.fullmatch(word)
    if pair is None:
        action = parse_action(word)
        return None if action is None else [action]
    forward, backward = (parse_action(part.strip()) for part in pair.groups())
    if forward is None or backward is None or forward.kind != FORWARD or backward.kind == FORWARD:
        return None
    return [forward, backward]


def _cells(order: Order, overlapped: frozenset[Action]) -> Iterator[str]:
    actions = iter(order)
    for action in actions:
        yield f"({action};{next(actions)})OVERLAP_F_B" if action in overlapped else str(action)
