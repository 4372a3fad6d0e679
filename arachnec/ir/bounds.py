"""How small and how large the numbers in an attribute are, by the text of its type (``arachnec.ir.kinds``).

Costs divide by some of them and take powers of others, so a number out of bounds must not come that far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TypeAlias

from arachnec.ir.kinds import ANY, POSITIVE, columns, plain
from arachnec.ir.limits import HIGHEST_POWER, LARGEST, SMALLEST
from arachnec.ir.printer import number
from arachnec.ir.values import Formula, Quantity, Value

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
