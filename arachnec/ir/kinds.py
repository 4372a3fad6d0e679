"""Attribute types: from the text in a table to a predicate on values, to their bounds, and to words for messages.

``int``, ``float``, ``str``, ``bool``; a unit (``ms``, ``GiB``, ...); ``ms formula``; ``@graph``; lists ``[int]`` and
``[str]``, lists of rows ``[[int, ms]]``, whose last item may be left out where it says ``int?``. Numbers are zero or
more; above zero where the type says ``int > 0``; of any sign where it says ``any int``, and in formulas. Costs divide
by some of them and take powers of others, so a number out of bounds must not come that far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

from arachnec.ir.limits import HIGHEST_POWER, LARGEST, SMALLEST
from arachnec.ir.printer import formula_text, number, string, symbol
from arachnec.ir.values import UNITS, Attributes, Formula, Quantity, Symbol, Value

Test: TypeAlias = Callable[[Value], bool]
VARIABLES = ("B", "S", "T")
POSITIVE, ANY, OPTIONAL = " > 0", "any ", "?"
SCALES = {"us": ("time", 1e-3), "ms": ("time", 1.0), "MiB": ("memory", 1 / 1024), "GiB": ("memory", 1.0)}


@functools.cache
def test(kind: str) -> Test:
    """The predicate of a type's text. Raises KeyError for a text that names no type."""
    kind = plain(kind)
    if kind.startswith("[["):
        named = columns(kind)
        parts = tuple(test(part.removesuffix(OPTIONAL)) for part in named)
        least = len(parts) - named[-1].endswith(OPTIONAL)
        return lambda value: (
            isinstance(value, tuple)
            and all(
                isinstance(row, tuple)
                and least <= len(row) <= len(parts)
                and all(part(item) for part, item in zip(parts, row, strict=False))
                for row in value
            )
        )
    if kind.startswith("["):
        item = test(kind[1:-1])
        return lambda value: isinstance(value, tuple) and all(map(item, value))
    if kind.endswith(" formula"):
        unit = kind.removesuffix(" formula")
        return lambda value: isinstance(value, Formula | Quantity) and value.unit == unit
    if kind in UNITS:
        return lambda value: type(value) is Quantity and value.unit == kind
    return _PLAIN[kind]


def plain(kind: str) -> str:
    """The type's text without what it says of its numbers' bounds."""
    return kind.replace(POSITIVE, "").replace(ANY, "")


def columns(kind: str) -> tuple[str, ...]:
    """The types of a list of rows."""
    return tuple(part.strip() for part in kind[2:-2].split(","))


_PLAIN: dict[str, Test] = {
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "str": lambda value: type(value) is str,
    "bool": lambda value: type(value) is bool,
    "int or bool": lambda value: type(value) in (int, bool),
    "@graph": lambda value: type(value) is Symbol,
}

_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "`true` or `false`",
    "int or bool": "an integer, `true` or `false`",
    "@graph": "the name of a graph, `@Block`",
    "[int]": "a list of integers",
    "[str]": "a list of strings",
    "[[int, ms]]": "a list of `[degree, time in ms]`",
    "[[int, int, int, int, ms]]": "a list of `[ranks, predictions, S, T, time in ms]`",
    "[[str, int]]": "a list of `[path, number]`",
    "[[str, us, GB/s]]": "a list of `[collective, latency, bandwidth]`",
    "[[int, str, GiB, TFLOP/s, GB/s]]": "a list of `[machines, device, memory, flops, intra]`",
    "[TFLOP formula]": "a list of formulas in `TFLOP`",
    "[GiB formula]": "a list of formulas in `GiB`",
    "[[int, GiB formula]]": "a list of `[layers, formula in GiB]`",
    "[[int, int]]": "a list of pairs of integers",
    "[[@graph, int]]": "a list of `[@graph, count]`",
    "[float]": "a list of numbers",
    "[[str, str]]": "a list of pairs of strings",
    "[[[int], float, [float], int?]]": "a list of `[layers, share, density of each head]`",
    "[[[int], [int], [int]]]": "a list of `[layers, place of each head, parts]`",
    "[[[int], int]]": "a list of `[list of integers, count]`",
}


def name(kind: str) -> str:
    """``a quantity in `ms```: a type as a person says it."""
    kind = plain(kind)
    if kind.endswith(" formula"):
        return f"a formula in `{kind.removesuffix(' formula')}`"
    return _NAMES.get(kind) or f"a quantity in `{kind}`"


def unit_of(kind: str) -> str | None:
    unit = plain(kind).removesuffix(" formula")
    return unit if unit in UNITS else None


def describe(value: Value) -> str:
    """``the string "a"``: a value as a person says it."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float):
        return f"the plain number `{value!r}`"
    if isinstance(value, str):
        return f"the string `{string(value)}`"
    if isinstance(value, Quantity):
        return f"`{number(value.value)} {value.unit}`"
    if isinstance(value, Formula):
        return f"the formula `{formula_text(value)}`"
    if isinstance(value, Symbol):
        return f"the name `{symbol(value.name)}`"
    return "a block of attributes" if isinstance(value, Attributes) else "a list of something else"


def in_unit(value: Quantity, unit: str) -> str:
    """``value`` written in ``unit``; the empty text where the units are of different dimensions."""
    here, there = SCALES.get(value.unit), SCALES.get(unit)
    if here is None or there is None or here[0] != there[0]:
        return ""
    return f"{number(float(f'{value.value * here[1] / there[1]:.12g}'))} {unit}"


Wrong: TypeAlias = tuple[str, str]
"""What was found, and what is expected."""


@functools.cache
def out_of_bounds(kind: str) -> Callable[[Value], Wrong | None]:
    """Of a type's text: the first number out of bounds in a value of that type, or None."""
    if kind.startswith("[["):
        parts = tuple(map(out_of_bounds, columns(kind)))
        return lambda value: next(_in_rows(value, parts), None)
    if kind.startswith("["):
        return functools.partial(_in_list, out_of_bounds(kind[1:-1]), plain(kind) == "[int]")
    if kind.startswith(ANY):
        return functools.partial(_of_one, -LARGEST)
    if kind.endswith(POSITIVE):
        return functools.partial(_of_one, 1 if kind.startswith("int") else SMALLEST)
    return functools.partial(_of_one, 0)


def _in_rows(value: Value, parts: tuple[Callable[[Value], Wrong | None], ...]) -> Iterator[Wrong]:
    for row in value if isinstance(value, tuple) else ():
        for item, part in zip(row if isinstance(row, tuple) else (), parts, strict=False):
            if wrong := part(item):
                yield wrong


def _in_list(item: Callable[[Value], Wrong | None], integers: bool, value: Value) -> Wrong | None:
    assert isinstance(value, tuple)
    if integers and value:  # lists of ranks and layers are long
        value = (min(value), max(value))  # type: ignore[type-var]
    return next(filter(None, map(item, value)), None)


def _of_one(least: float, value: Value) -> Wrong | None:
    if isinstance(value, Formula):
        return next(_in_terms(value), None)
    size = value.value if isinstance(value, Quantity) else value
    if not isinstance(size, int | float) or least <= size <= LARGEST:
        return None
    shown = f"{number(size)} {value.unit}" if isinstance(value, Quantity) else str(size)
    return shown, "1e15 at most" if size > least else "zero or more" if not least else f"{least} or more"


def _in_terms(formula: Formula) -> Iterator[Wrong]:
    for term in formula.terms:
        if sum(power for _, power in term.powers) > HIGHEST_POWER:
            yield "*".join(f"{name}^{power}" for name, power in term.powers), f"powers of {HIGHEST_POWER} at most"
        if abs(term.coefficient) > LARGEST:
            yield f"the coefficient {number(term.coefficient)}", "1e15 at most"
