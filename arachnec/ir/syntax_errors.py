"""Errors of a text that does not parse as a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class UnexpectedText(Diagnostic):
    title = "expected {expected}, found {found}"
    label = "not expected here"
    help = "docs/ir.md shows how it is written; the text may also have been cut off"
    expected: str
    found: str


@dataclass(frozen=True)
class UnknownWord(Diagnostic):
    title = "expected {expected}, found {found}"
    label = "not expected here"
    help = "did you mean `{suggestion}`?"
    expected: str
    found: str
    suggestion: str


@dataclass(frozen=True)
class TextEnds(Diagnostic):
    title = "the text ends in the middle of a module: expected {expected}"
    label = "the text ends here"
    help = "the file was cut off or is still being written; a module ends with `}}` on its last line"
    expected: str


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
class OpenString(Diagnostic):
    title = "a string without its closing quote"
    label = "opened here"
    help = 'close it with `"` on the same line; write a line break as `\\n`'


@dataclass(frozen=True)
class BadEscape(Diagnostic):
    title = "a string with an escape that does not exist"
    label = "in this string"
    help = 'escapes are those of JSON: `\\"`, `\\\\`, `\\n`, `\\t`, `\\u0041`'


@dataclass(frozen=True)
class TwiceGiven(Diagnostic):
    title = "{what} is given twice"
    label = "the second"
    help = "remove one of the two"
    what: str


@dataclass(frozen=True)
class NoLevel(Diagnostic):
    title = "module `@{name}` does not say its level"
    label = "no `level` among its attributes"
    help = 'write `attributes {{ level = "traced" }}`; levels are {levels}'
    name: str
    levels: str


@dataclass(frozen=True)
class UnknownLevel(Diagnostic):
    title = "there is no level {found}"
    label = "not a level"
    help = "levels are {levels}"
    found: str
    levels: str


@dataclass(frozen=True)
class BadRange(Diagnostic):
    title = "`{written}` is not a range"
    label = "in this list"
    help = "a range counts up, `4..7`, and has at most {most} numbers"
    written: str
    most: int


@dataclass(frozen=True)
class NotIntegers(Diagnostic):
    title = "expected a list of integers"
    label = "its list holds something else"
    help = "write `[0..3, 6]`"


@dataclass(frozen=True)
class BadNumber(Diagnostic):
    title = "`{written}` is too large for a number"
    label = "not a finite number"
    written: str
