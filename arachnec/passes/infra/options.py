"""The options of a pass as text: ``budget=500ms``, ``degrees=[1,2,4]``, ``policy=dual``."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union

from arachnec.passes.infra.base import AtLeast, Duration, Pass

MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4, "h": 3.6e6}
_BARE = re.compile(r"[^\s,{}\[\]\"=]+")


class BadOption(ValueError):
    """The text does not say a value of the option's type; the message says what would."""


def option_types(kind: type[Pass]) -> dict[str, Any]:
    """Option name to its type, in the order of the fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def describe(kind: Any) -> str:
    """How a person writes a value of this type."""
    inner, optional = _strip_optional(kind)
    word = _describe_plain(inner)
    return f"{word} or none" if optional else word


def _describe_plain(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        element = _describe_plain(typing.get_args(kind)[0])
        return f"[{element},...]"
    if (least := _least(kind)) is not None:
        return f"integer >= {least}"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


_NAMES: dict[Any, str] = {
    bool: "true|false",
    int: "integer",
    float: "number",
    str: "string",
    Duration: "time such as 500ms",
}


def read(kind: Any, text: str) -> Any:
    """The value that ``text`` says. Raises BadOption."""
    inner, optional = _strip_optional(kind)
    if optional and text == "none":
        return None
    if typing.get_origin(inner) is Literal:
        choices = typing.get_args(inner)
        value = _read_string(text)
        if value not in choices:
            raise BadOption(f"one of {', '.join(map(str, choices))}")
        return value
    if typing.get_origin(inner) is tuple:
        return _read_tuple(typing.get_args(inner)[0], text)
    if (least := _least(inner)) is not None:
        return _read_int(text, least)
    reader = _READERS.get(inner)
    if reader is None:
        raise TypeError(f"an option cannot be of type {kind}")
    return reader(text)


def write(kind: Any, value: Any) -> str:
    """The text that ``read`` reads back as ``value``."""
    inner, optional = _strip_optional(kind)
    if value is None:
        return "none"
    if inner is Duration:
        return f"{_number(float(value))}ms"
    if typing.get_origin(inner) is tuple:
        element = typing.get_args(inner)[0]
        return "[" + ",".join(write(element, part) for part in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        quoted = not _BARE.fullmatch(value) or (optional and value == "none")
        return json.dumps(value) if quoted else value
    return repr(float(value)) if inner is float else str(value)


def _least(kind: Any) -> int | None:
    """Of an integer with a least value."""
    if typing.get_origin(kind) is not Annotated:
        return None
    return next((mark.least for mark in kind.__metadata__ if isinstance(mark, AtLeast)), None)


def _number(value: float) -> str:
    is_integer = value.is_integer() and abs(value) < 1e15 and repr(value) != "-0.0"
    return str(int(value)) if is_integer else repr(value)


def _strip_optional(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind, False
    arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
    return (arms[0], True) if len(arms) == 1 else (kind, False)


def _read_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise BadOption("true or false")
    return text == "true"


def _read_int(text: str, least: int | None = None) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,4000}", text) or (least is not None and int(text) < least):
        raise BadOption("an integer" if least is None else f"an integer, {least} at least")
    return int(text)


def _read_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadOption("a number") from None
    if not math.isfinite(value):
        raise BadOption("a finite number")
    return value


def _read_string(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        raise BadOption("a string in quotes, escaped as in JSON") from None


def _read_duration(text: str) -> float:
    match = re.fullmatch(r"([0-9.eE+-]+?)\s*(us|ms|s|min|h)", text)
    value = _read_float(match[1]) if match is not None else -1.0
    if match is None or value < 0:
        raise BadOption("a time with its unit: us, ms, s, min or h, such as 500ms")
    return value * MS[match[2]]


def _read_tuple(element: Any, text: str) -> tuple[Any, ...]:
    if not (text.startswith("[") and text.endswith("]")):
        raise BadOption(f"a list such as [{'1,2,4' if element is int else 'a,b'}]")
    return tuple(read(element, part) for part in split(text[1:-1]))


def split(text: str) -> list[str]:
    """Cut at the commas that ``elements`` cuts at; blanks around the parts are dropped."""
    parts = [text[start:end].strip() for start, end in elements(text)]
    return parts if parts != [""] else []


def elements(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each part between the commas outside brackets, braces and quotes."""
    depth, start, quoted, at = 0, 0, False, 0
    while at < len(text):
        char = text[at]
        if quoted:
            at += char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield start, at
            start = at + 1
        at += 1
    yield start, len(text)


_READERS: dict[Any, Callable[[str], Any]] = {
    bool: _read_bool,
    int: _read_int,
    float: _read_float,
    str: _read_string,
    Duration: _read_duration,
}
