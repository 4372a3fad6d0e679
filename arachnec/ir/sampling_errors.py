"""Errors of requests and of ``denoise`` cascades."""

from __future__ import annotations

from arachnec.ir.diagnostic import Mistake
from arachnec.ir.span import Span


def wrong_steps_error(span: Span | None, node: str, steps: str, reason: str) -> Mistake:
    return Mistake(
        span,
        f"{node} has steps {steps}, {reason}",
        label=f"steps {steps}",
        help="`steps = [first, last]`, counted from 0: the last of a request of 50 is 49",
    )


def unlike_request_error(span: Span | None, node: str, what: str, value: str, request: int, right: str) -> Mistake:
    return Mistake(
        span,
        f"{node} has {what} = {value}, and its request {request} has {right}",
        label="not its request's",
        help="a batch holds requests of equal steps, branches and window, and says the same",
    )


def wrong_window_error(span: Span | None, clip: int, what: str, value: str, reason: str) -> Mistake:
    return Mistake(
        span,
        f"clip {clip} has {what} {value}, {reason}",
        label=f"{what} {value}",
        help="`window = [least, most]`, 0 <= least <= forecast <= most <= steps",
    )


def switch_unsaid_error(span: Span | None, node: str, reason: str, remedy: str) -> Mistake:
    return Mistake(
        span,
        f"{node} {reason}",
        label=remedy,
        help=(
            "a segment says `switch` where an outcome changes which of its steps it takes, the same rule as "
            "the module's"
        ),
    )
