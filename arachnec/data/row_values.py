"""The values of one row of a manifest or of a file of requests, and what is wrong with them.

``what`` is the word for what a row stands for: a clip, a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.data.clip import caption_tokens
from arachnec.data.rows import Row
from arachnec.ir.diagnostic import Diagnostic, Span, UserError, user_error
from arachnec.ir.limits import HIGHEST_RATE, LATEST_START, LOWEST_RATE, MOST_COUNTED, MOST_SAMPLING_STEPS

LEAST = dict.fromkeys(("frames", "height", "width", "clips", "stride", "steps"), 1)
LEAST |= dict.fromkeys(("text_tokens", "start", "seed"), 0)
MOST = dict.fromkeys(LEAST, MOST_COUNTED) | {"start": LATEST_START, "steps": MOST_SAMPLING_STEPS, "seed": 2**63 - 1}


def missing_key_error(span: Span | None, what: str, key: str, remedy: str) -> UserError:
    return user_error(f"the {what} has no `{key}`", label="missing here", help=remedy, span=span)


@dataclass(frozen=True)
class BadValue(Diagnostic):
    title = "`{key}` is {found}, expected {expected}"
    label = "expected {expected}"
    help = "{remedy}"
    key: str
    found: str
    expected: str
    remedy: str


def same_id_error(span: Span | None, what: str, id: str | int, row: int, reason: str) -> UserError:
    return user_error(
        f"two {what}s have the id `{id}`",
        label=f"the other is in row {row}, counted from 1",
        help=f"{reason}; leave `id` out to use the row's number",
        span=span,
    )


def integer(row: Row, key: str) -> int | None:
    """The row's whole number; None where it has none. Raises ``UserError`` out of its bounds."""
    value = row.values.get(key)
    if value is None:
        return None
    least = LEAST[key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(bad_value(row, key, f"an integer of at least {least}", f"write `{key}` as a whole number"))
    if value < least:
        remedy = "an image is a clip of 1 frame" if key == "frames" else f"the smallest `{key}` is {least}"
        raise UserError(bad_value(row, key, f"at least {least}", remedy))
    if value > MOST[key]:
        raise UserError(bad_value(row, key, f"at most {MOST[key]}", f"correct `{key}`"))
    return value


def bad_value(row: Row, key: str, expected: str, remedy: str) -> BadValue:
    """The diagnostic at the key of the row, under whichever name it is written there."""
    shown = repr(row.values[key])
    return BadValue(
        row.span(row.written.get(key, key)), key, shown if len(shown) <= 80 else f"{shown[:77]}...", expected, remedy
    )


def _is_text(value: str) -> bool:
    """Whether it has no half of a surrogate pair, as JSON's escapes can."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def rate(row: Row, key: str) -> float | None:
    """The row's frames a second; None where it has none. Raises ``UserError`` for what is no rate of a video."""
    value = row.values.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not LOWEST_RATE <= value <= HIGHEST_RATE:
        expected = f"a number of frames a second, from {LOWEST_RATE} to {HIGHEST_RATE}"
        raise UserError(bad_value(row, key, expected, f"write `{key}` as a number, such as 16 or 29.97"))
    return float(value)


def text(row: Row, key: str) -> str | None:
    """The row's text; None where it has none. Raises ``UserError`` for what is none or cannot be written."""
    value = row.values.get(key)
    if not isinstance(value, str | None):
        raise UserError(bad_value(row, key, "a string", f"put the {key.replace('_', ' ')} in quotes"))
    if value is not None and not _is_text(value):
        raise UserError(bad_value(row, key, "text that UTF-8 can hold", "write the characters themselves, unescaped"))
    return value


def identifier(row: Row) -> str | int:
    """The row's ``id``, else its number. Raises ``UserError``."""
    value = row.values.get("id", row.number)
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise UserError(bad_value(row, "id", "a string or a number", "leave `id` out to use the row's number"))
    if isinstance(value, str) and not _is_text(value):
        raise UserError(bad_value(row, "id", "text that UTF-8 can hold", "write the characters themselves, unescaped"))
    return value


def texts(row: Row, key: str) -> tuple[str, ...]:
    """The row's text, or those of its list; empty where it has none. Raises ``UserError`` as ``text``."""
    value = row.values.get(key)
    if not isinstance(value, list):
        one = text(row, key)
        return () if one is None else (one,)
    if not value or not all(isinstance(item, str) and _is_text(item) for item in value):
        raise UserError(bad_value(row, key, "a text or a list of texts", f"put the {key} in quotes"))
    return tuple(value)


def tokens_of_text(row: Row, what: str, captions: Sequence[str]) -> int:
    """The row's ``text_tokens``, else as many as its longest caption has. Raises ``UserError`` where there is
    neither."""
    tokens = integer(row, "text_tokens")
    if tokens is not None:
        return tokens
    if not captions:
        remedy = "add `caption`, or `text_tokens` (0 for a model that reads no text)"
        raise missing_key_error(row.span(), what, "text_tokens", remedy)
    return max(map(caption_tokens, captions))
