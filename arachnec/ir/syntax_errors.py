"""Errors of a text that does not parse as a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class UnexpectedText(Diagnostic):
    title: ClassVar[str] = "expected {expected}, found {found}"
    label: ClassVar[str] = "not expected here"
    help: ClassVar[str] = "docs/ir.md shows how it is written; the text may also have been cut off"
    expected: str
    found: str


@dataclass(frozen=True)
class UnknownWord(Diagnostic):
    title: ClassVar[str] = "expected {expected}, found {found}"
    label: ClassVar[str] = "not expected here"
    help: ClassVar[str] = "did you mean `{suggestion}`?"
    expected: str
    found: str
    suggestion: str


@dataclass(frozen=True)
class TextEnds(Diagnostic):
    title: ClassVar[str] = "the text ends in the middle of a module: expected {expected}"
    label: ClassVar[str] = "the text ends here"
    help: ClassVar[str] = "the file was cut off or is still being written; a module ends with `}}` on its last line"
    expected: str


BEGINNING = 'a module begins with `module @name attributes {{ level = "traced" }} {{`'


@dataclass(frozen=True)
class TextTooLarge(Diagnostic):
    title: ClassVar[str] = "{file} is larger than {most} MiB, and no module is read that is"
    help: ClassVar[str] = "plan fewer clips in a step, or on fewer ranks: an instruction takes some 100 bytes"
    file: str
    most: int


@dataclass(frozen=True)
class NoModule(Diagnostic):
    title: ClassVar[str] = "there is no module in {file}"
    help: ClassVar[str] = BEGINNING
    file: str


@dataclass(frozen=True)
class NotAModule(Diagnostic):
    title: ClassVar[str] = "expected `module`, found {found}"
    label: ClassVar[str] = "not the beginning of a module"
    help: ClassVar[str] = f"{BEGINNING}; give a file that `arachnec opt` or `arachnec compile` wrote"
    found: str


@dataclass(frozen=True)
class OpenString(Diagnostic):
    title: ClassVar[str] = "a string without its closing quote"
    label: ClassVar[str] = "opened here"
    help: ClassVar[str] = 'close it with `"` on the same line; write a line break as `\\n`'


@dataclass(frozen=True)
class BadEscape(Diagnostic):
    title: ClassVar[str] = "a string with an escape that does not exist"
    label: ClassVar[str] = "in this string"
    help: ClassVar[str] = 'escapes are those of JSON: `\\"`, `\\\\`, `\\n`, `\\t`, `\\u0041`'


@dataclass(frozen=True)
class TwiceGiven(Diagnostic):
    title: ClassVar[str] = "{what} is given twice"
    label: ClassVar[str] = "the second"
    help: ClassVar[str] = "remove one of the two"
    what: str


@dataclass(frozen=True)
class NoLevel(Diagnostic):
    title: ClassVar[str] = "module `@{name}` does not say its level"
    label: ClassVar[str] = "no `level` among its attributes"
    help: ClassVar[str] = 'write `attributes {{ level = "traced" }}`; levels are {levels}'
    name: str
    levels: str


@dataclass(frozen=True)
class UnknownLevel(Diagnostic):
    title: ClassVar[str] = "there is no level {found}"
    label: ClassVar[str] = "not a level"
    help: ClassVar[str] = "levels are {levels}"
    found: str
    levels: str


@dataclass(frozen=True)
class BadRange(Diagnostic):
    title: ClassVar[str] = "`{written}` is not a range"
    label: ClassVar[str] = "in this list"
    help: ClassVar[str] = "a range counts up, `4..7`, and has at most {most} numbers"
    written: str
    most: int


@dataclass(frozen=True)
class NotIntegers(Diagnostic):
    title: ClassVar[str] = "expected a list of integers"
    label: ClassVar[str] = "its list holds something else"
    help: ClassVar[str] = "write `[0..3, 6]`"


@dataclass(frozen=True)
class BadNumber(Diagnostic):
    title: ClassVar[str] = "`{written}` is too large for a number"
    label: ClassVar[str] = "not a finite number"
    written: str
