"""Errors of a text that does not parse as a module."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic, Span, UserError, user_error

BEGINNING = 'a module begins with `module @name attributes {{ level = "traced" }} {{`'


def text_too_large_error(file: str, most: int) -> UserError:
    return user_error(
        f"{file} is larger than {most} MiB, and no module is read that is",
        help="plan fewer clips in a step, or on fewer ranks: an instruction takes some 100 bytes",
    )


@dataclass(frozen=True)
class NoModule(Diagnostic):
    title = "there is no module in {file}"
    help = BEGINNING
    file: str


@dataclass(frozen=True)
class NotAModule(Diagnostic):
    title = "expected `module`, found {found}"
    label = "not the beginning of a module"
    help = f"{BEGINNING}; give a file that `arachnec opt` or `arachnec compile` wrote"
    found: str


def twice_given_error(span: Span | None, what: str) -> UserError:
    return user_error(f"{what} is given twice", label="the second", help="remove one of the two", span=span)


def bad_number_error(span: Span | None, written: str) -> UserError:
    return user_error(f"`{written}` is too large for a number", label="not a finite number", span=span)
