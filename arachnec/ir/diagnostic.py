"""Errors as data: what is wrong, where, and the remedy, rendered with location, line and carets.

The message stands where it is raised::

    raise user_error(f"unknown key `{key}`", label="no such key", help="did you mean `frames`?", span=span)

``check`` shows one mistake of each ``kind``, a word or two that a ``Mistake`` is given. A mistake whose fields code or
a test reads is a class, with texts as format strings over them::

    @dataclass(frozen=True)
    class UnknownKey(Diagnostic):
        title = "unknown key `{key}`"
        label = "no such key"
        help = "did you mean `{suggestion}`?"
        key: str
        suggestion: str
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from arachnec.ir.limits import LARGEST_SHOWN, LONGEST_ERRORS, LONGEST_FIELD, LONGEST_TEXT, MOST_ERRORS, WIDEST_LINE


@dataclass(frozen=True)
class Span:
    """Lines and columns count from 1, the end is exclusive.

    ``source`` is the whole text, so that a message can show the line even when it came from no file.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    source: str | None = field(default=None, compare=False, repr=False)


PIECE, ROW = 2**20, 2**20  # characters of a file that are read at once to show a line


class _Texts:
    title: str
    label: str = ""
    help: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Diagnostic(_Texts):
    """A mistake and its place in a file; ``span`` is None where there is none. Subclasses add what is wrong."""

    span: Span | None

    @property
    def message(self) -> str:
        """The first line of the rendered error, without its place."""
        return self.text(self.title)

    def text(self, template: str) -> str:
        """One of the three texts, with this object's fields in it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return template.format(**{name: shown(value) for name, value in fields.items()})


@dataclass(frozen=True)
class Mistake(Diagnostic):
    """A mistake whose texts are complete. Of one with a ``kind``, ``check`` reports the first alone."""

    title: str
    label: str = ""
    help: str = ""
    kind: str = ""

    def text(self, template: str) -> str:
        return shown_text(template)


class UserError(Exception):
    """What a command raises for bad input: it is printed, the exit code is 2, and there is no traceback."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        super().__init__("\n".join(d.message for d in diagnostics[:MOST_ERRORS]))
        self.diagnostics = diagnostics


def user_error(title: str, *, label: str = "", help: str = "", span: Span | None = None) -> UserError:
    """The error of one mistake that is only reported."""
    return UserError(Mistake(span, title, label, help))


@dataclass(frozen=True)
class SystemRefuses(Diagnostic):
    """A file or folder that the operating system refuses: missing, not writable, on a full disk."""

    title = "{path}{reason}"
    help = "give another path, or make this one readable and writable, on a disk with space"
    path: str
    reason: str


def shown(value: object) -> object:
    """A field as a terminal may have it: no control character but a line's end, and never the whole of a long text."""
    if isinstance(value, int) and abs(value) >= LARGEST_SHOWN:
        return f"an integer of {value.bit_length()} bits"
    if not isinstance(value, str):
        return value
    return printable(value if len(value) <= LONGEST_FIELD else f"{value[: LONGEST_FIELD - 3]}...")


def shown_text(text: str) -> str:
    """A complete text as a terminal may have it: of a long one its beginning and its end."""
    if len(text) > LONGEST_TEXT:
        text = f"{text[: LONGEST_FIELD // 2]}...{text[-LONGEST_FIELD // 3 :]}"
    return printable(text)


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def close_to(word: str, known: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The known word that is most like a given one, which may be as long as its file; none below ``cutoff``."""
    import difflib

    return difflib.get_close_matches(word[:LONGEST_FIELD], known, 1, cutoff)


def counted(number: int, noun: str) -> str:
    """``1 GPU`` or ``2 GPUs``, of ``"GPU"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def refused(error: OSError) -> SystemRefuses | None:
    """The diagnostic for an error about a path or a full disk; None for any other error."""
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    path = f"{error.filename}: " if error.filename is not None else ""
    return SystemRefuses(None, path, (error.strerror or str(error)).lower())


@contextmanager
def writing(path: object) -> Iterator[None]:
    """An error of the system in here names the file: that a disk is full says of which only who opens it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def render(diagnostic: Diagnostic, source: str | None = None) -> str:
    """The message as a person reads it. ``source`` is the file's text; without it the file is read if it is there."""
    lines = [f"error: {diagnostic.message}"]
    span = diagnostic.span
    if span is not None:
        lines.append(f"  --> {span.file}:{span.line}:{span.column}")
        lines += _excerpt(span, source, diagnostic.text(diagnostic.label))
    if diagnostic.help:
        lines.append(f"  help: {diagnostic.text(diagnostic.help)}")
    return "\n".join(lines)


def render_all(diagnostics: Sequence[Diagnostic]) -> str:
    """The messages of a command: at most ``MOST_ERRORS`` of them and ``LONGEST_ERRORS`` characters."""
    texts: list[str] = []
    length = 0
    for diagnostic in diagnostics[:MOST_ERRORS]:
        text = render(diagnostic)
        length += len(text)
        if texts and length > LONGEST_ERRORS:
            break
        texts.append(text)
    left = len(diagnostics) - len(texts)
    return "\n".join([*texts, f"... and {left} more"] if left else texts)


def _excerpt(span: Span, source: str | None, label: str) -> list[str]:
    source = span.source if source is None else source
    if source is not None:
        row = _line_of(source, span.line)
    elif (path := Path(span.file)).is_file():
        row = _line_of_file(path, span.line)
    elif label:
        return [f"   = {label}"]
    else:
        return []
    if row is None:
        return [f"   = {label}"]
    end = min(span.end_column if span.end_line == span.line else len(row) + 1, span.column + WIDEST_LINE)
    # left out at the row's beginning
    before = max(0, span.column - 1 - WIDEST_LINE // 2) if len(row) > WIDEST_LINE else 0
    row = row[before : before + WIDEST_LINE]
    row = "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in row)
    carets = "^" * max(1, min(end - span.column, len(row) - (span.column - 1 - before)))
    gutter = str(span.line)
    pad = " " * len(gutter)
    return [
        f" {pad} |",
        f" {gutter} | {row}",
        f" {pad} | {' ' * min(span.column - 1 - before, WIDEST_LINE)}{carets} {label}".rstrip(),
    ]


def _line_of(source: str, line: int) -> str | None:
    """A line of a text, counted from 1, without its end."""
    at, before = 0, 1
    while before < line and at < len(source):  # whole pieces first: one may be a million short lines
        ends = source.count("\n", at, at + PIECE)
        if before + ends >= line:
            break
        at, before = at + PIECE, before + ends
    for _ in range(line - before):
        at = source.find("\n", at) + 1
        if not at:
            return None
    if not 0 <= at < len(source) or line < 1:
        return None
    end = source.find("\n", at)
    return source[at : end if end >= 0 else None].rstrip("\r")


def _line_of_file(path: Path, line: int) -> str | None:
    """The same of a file, of which no more than a piece is in memory."""
    before = 1
    with path.open(encoding="utf-8", errors="replace") as file:
        while text := file.read(PIECE):
            ends = text.count("\n")
            if before + ends >= line:
                return _line_of(text + file.readline(ROW), line - before + 1)
            before += ends
    return None


def text_too_large_error(file: str, most: int) -> UserError:
    return user_error(
        f"{file} is larger than {most} MiB, and no module is read that is",
        help="plan fewer clips in a step, or on fewer ranks: an instruction takes some 100 bytes",
    )
