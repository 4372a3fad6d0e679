"""Errors of a module that parsed: one Diagnostic per rule of the verifier."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.span import Span

# attributes


@dataclass(frozen=True)
class OutOfBounds(Diagnostic):
    title = "`{name}` of {node} has {found}"
    label = "expected {expected}"
    help = "`{name}`: {meaning}"
    node: str
    name: str
    found: str
    expected: str
    meaning: str


# names


def duplicate_name_error(span: Span | None, node: str) -> Mistake:
    return Mistake(span, f"there are two of {node}", label="the second", help="give each its own name")


# cascades


def wrong_shards_error(span: Span | None, node: str, what: str, expected: str) -> Mistake:
    return Mistake(span, f"{node} has shards {what}", label=f"expected {expected}")


# graphs
