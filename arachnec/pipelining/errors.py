"""The errors of pipeline schedules that are found in more than one place."""

from __future__ import annotations

from arachnec.ir.diagnostic import Mistake, Span, UserError, user_error
from arachnec.pipelining.action import PHASES, Action


def fits_nowhere(layers: int, ranks: int) -> UserError:
    return user_error(
        f"no pipeline of {layers} layers fits into the memory of {ranks} ranks",
        help="use more ranks, smaller micro-batches, or recompute more blocks",
    )


def missing_action(action: Action, rank: int, span: Span | None = None) -> Mistake:
    stage, kind, micro_batch = action
    return Mistake(
        span,
        f"stage {stage} has no {PHASES[kind]} of micro-batch {micro_batch}",
        label=f"the row of rank {rank} lacks it",
        help=f"add `{action}` to the row of rank {rank}",
    )


def missing_stage(stage: int, stages: int, span: Span | None = None) -> Mistake:
    return Mistake(
        span,
        f"no rank runs stage {stage}, though there are {stages}",
        help="stages count from 0 without a gap: add a row with its actions",
    )


def action_too_early(action: Action, needed: Action, rank: int, span: Span | None = None) -> Mistake:
    return Mistake(
        span,
        f"rank {rank} runs `{action}` before `{needed}`",
        label=f"needs what `{needed}` leaves",
        help=f"on one rank, write `{needed}` first",
    )
