"""Schedules in the CSV of ``torch.distributed.pipelining``: one row a rank, one action a cell, empty cells allowed.

Read are also what torch derives itself when it lowers a schedule, and arachnec likewise: sends, receives, unshards,
reshards and ``REDUCE_GRAD`` are checked as words and left out. ``(0F4;7B0)OVERLAP_F_B`` is DualPipeV's pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from arachnec.ir.diagnostic import Diagnostic, Span, UserError, user_error
from arachnec.ir.limits import LARGEST_DATA, MOST_CELLS, MOST_SCHEDULE_RANKS
from arachnec.pipelining.action import FORWARD, Action, Order, PipelineSchedule, parse_action
from arachnec.pipelining.errors import NoText, ScheduleTooLarge, UnknownAction
from arachnec.pipelining.schedule_rules import require_valid

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
    if path.stat().st_size > LARGEST_DATA:
        raise UserError(ScheduleTooLarge(None, "bytes", path.stat().st_size, LARGEST_DATA))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(NoText(None, str(path), "a CSV as torch.distributed.pipelining writes it")) from None
    return from_csv(text, str(path), stages, micro_batches)


def from_csv(text: str, file: str, stages: int | None = None, micro_batches: int | None = None) -> PipelineSchedule:
    """The schedule of a CSV. UserError for words that are no action and for schedules that break a rule.

    ``file`` names the text in errors. With ``stages`` or ``micro_batches`` the schedule must be for that many.
    """
    rows = text.splitlines()
    _require_size(rows)
    orders: list[Order] = []
    cells: list[list[tuple[int, int]]] = []  # first and last column of every action's cell
    overlapped: set[Action] = set()
    wrong: list[Diagnostic] = []
    for number, row in enumerate(rows, 1):
        order: list[Action] = []
        columns: list[tuple[int, int]] = []
        for column, word in _words(row):
            actions = _actions(word)
            if actions is None:
                wrong.append(UnknownAction(Span(file, number, column, number, column + len(word), text), word[:40]))
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


def _require_size(rows: list[str]) -> None:
    if len(rows) > MOST_SCHEDULE_RANKS:
        raise UserError(ScheduleTooLarge(None, "rows", len(rows), MOST_SCHEDULE_RANKS))
    cells = sum(row.count(",") + 1 for row in rows)
    if cells > MOST_CELLS:
        raise UserError(ScheduleTooLarge(None, "cells", cells, MOST_CELLS))


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
