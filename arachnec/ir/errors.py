"""Errors of a module that parsed: one Diagnostic per rule of the verifier."""

from __future__ import annotations

from arachnec.ir.diagnostic import Mistake
from arachnec.ir.span import Span

# attributes


def out_of_bounds_error(span: Span | None, node: str, name: str, found: str, expected: str, meaning: str) -> Mistake:
    return Mistake(span, f"`{name}` of {node} has {found}", label=f"expected {expected}", help=f"`{name}`: {meaning}")


# names


def duplicate_name_error(span: Span | None, node: str) -> Mistake:
    return Mistake(span, f"there are two of {node}", label="the second", help="give each its own name")


# cascades


def wrong_shards_error(span: Span | None, node: str, what: str, expected: str) -> Mistake:
    return Mistake(span, f"{node} has shards {what}", label=f"expected {expected}")


# graphs
