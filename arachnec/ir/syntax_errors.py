"""Errors of a text that does not parse as a module."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic

BEGINNING = 'a module begins with `module @name attributes {{ level = "traced" }} {{`'


@dataclass(frozen=True)
class TextTooLarge(Diagnostic):
    title = "{file} is larger than {most} MiB, and no module is read that is"
    help = "plan fewer clips in a step, or on fewer ranks: an instruction takes some 100 bytes"
    file: str
    most: int


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


@dataclass(frozen=True)
class TwiceGiven(Diagnostic):
    title = "{what} is given twice"
    label = "the second"
    help = "remove one of the two"
    what: str


@dataclass(frozen=True)
class BadNumber(Diagnostic):
    title = "`{written}` is too large for a number"
    label = "not a finite number"
    written: str
