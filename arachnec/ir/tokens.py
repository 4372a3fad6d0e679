"""Tokens to values: names, strings, numbers, ranges and tensor types, each with its span.

``PARSED`` says which file is being parsed. Every function raises UserError at a token that has no value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import cast

from lark import Token

from arachnec.ir import syntax_errors
from arachnec.ir.diagnostic import Span, user_error
from arachnec.ir.limits import LONGEST_INTEGER, LONGEST_RANGE
from arachnec.ir.nodes import TensorType

PARSED: ContextVar[tuple[str, str]] = ContextVar("name and text of the file being parsed")


def span_of(first: Token, last: Token | None = None) -> Span:
    file, text = PARSED.get()
    end = first if last is None else last
    return Span(file, first.line or 1, first.column or 1, end.end_line or 1, end.end_column or 1, text)


def name_of(token: Token) -> str:
    """The name of a ``@symbol`` or ``%value``."""
    return string_of(token, token[1:]) if token[1] == '"' else str(token[1:])


def string_of(token: Token, text: str) -> str:
    try:
        return cast(str, json.loads(text, strict=False))
    except ValueError:
        raise user_error(
            "a string with an escape that does not exist",
            label="in this string",
            help='escapes are those of JSON: `\\"`, `\\\\`, `\\n`, `\\t`, `\\u0041`',
            span=span_of(token),
        ) from None


def number_of(token: Token, text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise syntax_errors.bad_number_error(span_of(token), written=text)
    return value


def integer_of(token: Token) -> int:
    if len(token) > LONGEST_INTEGER:
        raise syntax_errors.bad_number_error(span_of(token), written=f"{token[:12]}...")
    return int(token)


def range_of(token: Token, text: str) -> range:
    first, _, last = text.partition("..")
    if max(len(first), len(last)) > LONGEST_INTEGER:
        raise syntax_errors.bad_number_error(span_of(token), written=f"{text[:12]}...")
    low, high = int(first), int(last or first)
    if high < low or high - low >= LONGEST_RANGE:
        raise user_error(
            f"`{text}` is not a range",
            label="in this list",
            help=f"a range counts up, `4..7`, and has at most {LONGEST_RANGE} numbers",
            span=span_of(token),
        )
    return range(low, high + 1)


def integers_of(values: Sequence[object], node: Span) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise user_error(
            "expected a list of integers", label="its list holds something else", help="write `[0..3, 6]`", span=node
        )
    return tuple(cast("Sequence[int]", values))


def _dimension(token: Token, text: str) -> int | str:
    if not re.fullmatch(r"-?[0-9]+", text):
        return text
    return whole_number(token, text)


def whole_number(token: Token, text: str) -> int:
    """A number that stands inside a token."""
    if len(text) > LONGEST_INTEGER:
        raise syntax_errors.bad_number_error(span_of(token), written=f"{text[:12]}...")
    return int(text)


def tensor_type_of(token: Token) -> TensorType:
    dtype, _, rest = token[:-1].partition("[")
    dims, depth, start = [], 0, 0
    for at, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            dims.append(rest[start:at])
            start = at + 1
    last = rest[start:]
    if last.strip():
        dims.append(last)
    return TensorType(str(dtype), tuple(_dimension(token, dim.strip()) for dim in dims))
