"""Manifest rows. In: a JSONL, CSV or Parquet file. Out: rows whose keys are known, each with its place in the file."""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TextIO

from arachnec.ir.diagnostic import Diagnostic, UserError, close_to
from arachnec.ir.nodes import Span

LARGEST_FILE = 2**28  # bytes
MOST_ROWS = 2**18
MOST_LINES = 2**21  # blank ones, and those of quoted texts, too
LONGEST_ROW = 2**22  # characters

ALIASES = {"num_frames": "frames", "text": "caption", "video": "path"}
KEYS = (
    *("frames", "height", "width", "text_tokens", "caption", "path", "id", "clips", "iteration", "start", "encoded"),
    *("fps", "target_fps", "stride"),
    # How another system grouped these clips; read and not used, because partitioning is a pass.
    "micro_batch",
)


@dataclass(frozen=True)
class RowKeys:
    """The keys that rows may have, their other names, and which of them are text or any number in a CSV file."""

    keys: tuple[str, ...]
    aliases: Mapping[str, str]
    texts: tuple[str, ...] = ("caption", "path")
    fractions: tuple[str, ...] = ()


CLIP_KEYS = RowKeys(KEYS, ALIASES, fractions=("fps", "target_fps"))


@dataclass(frozen=True)
class NoManifest(Diagnostic):
    title: ClassVar[str] = "there is no manifest `{path}`"
    help: ClassVar[str] = "give a .jsonl, .csv or .parquet file, with a row for each clip or request"
    path: str


@dataclass(frozen=True)
class UnknownFormat(Diagnostic):
    title: ClassVar[str] = "`{path}` is not a manifest: its extension is `{suffix}`"
    help: ClassVar[str] = "manifests end in .jsonl, .csv or .parquet"
    path: str
    suffix: str


@dataclass(frozen=True)
class NoPyArrow(Diagnostic):
    title: ClassVar[str] = "reading `{path}` needs pyarrow, which is not installed"
    help: ClassVar[str] = "pip install 'pyarrow>=15', or write the manifest as .jsonl"
    path: str


@dataclass(frozen=True)
class UnreadableManifest(Diagnostic):
    title: ClassVar[str] = "`{path}` cannot be read: {reason}"
    help: ClassVar[str] = "write the manifest again as UTF-8 .jsonl, .csv or .parquet"
    path: str
    reason: str


@dataclass(frozen=True)
class ManifestTooLarge(Diagnostic):
    title: ClassVar[str] = "`{path}` is too large to list: it has more than {most} {what}"
    help: ClassVar[str] = "give fewer rows, or write clips as .parquet, of which a run reads the rows that it draws"
    path: str
    most: int
    what: str


@dataclass(frozen=True)
class BadRow(Diagnostic):
    title: ClassVar[str] = "this row is not {expected}"
    label: ClassVar[str] = "{reason}"
    help: ClassVar[str] = "{remedy}"
    expected: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class UnknownKey(Diagnostic):
    title: ClassVar[str] = "unknown key `{key}`"
    label: ClassVar[str] = "no such key"
    help: ClassVar[str] = "{suggestion}"
    key: str
    suggestion: str


@dataclass(frozen=True)
class KeyTwice(Diagnostic):
    title: ClassVar[str] = "`{key}` and `{other}` are two names of one thing"
    label: ClassVar[str] = "given twice"
    help: ClassVar[str] = "keep `{key}`"
    key: str
    other: str


@dataclass(frozen=True)
class RepeatedKey(Diagnostic):
    title: ClassVar[str] = "`{key}` is given twice"
    label: ClassVar[str] = "the second one"
    help: ClassVar[str] = "keep one of them; to list another clip, write another row"
    key: str


@dataclass(frozen=True)
class Row:
    """One row: its values by canonical key, and its place. ``text`` is empty for Parquet; ``written`` are the keys that
    the row calls otherwise."""

    number: int
    values: Mapping[str, Any]
    file: Path
    line: int
    text: str
    written: Mapping[str, str] = field(default_factory=dict)

    def span(self, key: str | None = None) -> Span:
        """The key in the row's text, or the whole row; a Parquet row's number stands by the file's name."""
        if not self.text:
            return Span(f"{self.file} (row {self.number + 1})", 1, 1, 1, 1)
        column = self.text.find(f'"{key}"') if key else -1
        if column < 0:
            return Span(str(self.file), self.line, 1, self.line, len(self.text) + 1)
        return Span(str(self.file), self.line, column + 1, self.line, column + len(f'"{key}"') + 1)


def read_rows(path: Path, keys: RowKeys = CLIP_KEYS) -> Iterator[Row]:
    """Rows in the file's order, by canonical keys. Raises ``UserError`` for a row that cannot be read."""
    if not path.is_file():
        raise UserError(NoManifest(None, str(path)))
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(UnknownFormat(None, str(path), path.suffix or "missing"))
    return reader(path, keys)


class _Lines:
    """A file's lines with their ends, one after the other: no more of it is in memory. Raises ``UserError``."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self.file = path, file
        self.number, self.text = 0, ""  # of the newest line
        self.taken = 0  # characters since a row ended

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        try:
            line = self.file.readline(LONGEST_ROW + 1)
        except UnicodeDecodeError:
            raise UserError(
                UnreadableManifest(None, str(self.path), f"not UTF-8 at byte {_wrong_byte(self.path)}")
            ) from None
        self.taken += len(line)
        if not line:
            raise StopIteration
        self.number, self.text = self.number + 1, line.rstrip("\r\n")
        if self.number > MOST_LINES:
            raise UserError(ManifestTooLarge(None, str(self.path), MOST_LINES, "lines"))
        if self.taken > LONGEST_ROW:
            reason = f"it has more than {LONGEST_ROW} characters"
            span = Span(str(self.path), self.number, 1, self.number, 2)
            raise UserError(BadRow(span, "a row", reason, "end every row with a line's end, and close every quote"))
        return line

    def row_ends(self, rows: int) -> None:
        self.taken = 0
        if rows > MOST_ROWS:
            raise UserError(ManifestTooLarge(None, str(self.path), MOST_ROWS, "rows"))


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[_Lines]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(ManifestTooLarge(None, str(path), LARGEST_FILE >> 20, "MiB"))
        with path.open(encoding="utf-8-sig") as file:
            yield _Lines(path, file)
    except OSError as error:
        raise UserError(UnreadableManifest(None, str(path), str(error.strerror))) from None


def _wrong_byte(path: Path) -> int:
    """Where a file's first byte that is no UTF-8 stands."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        for data in iter(functools.partial(file.read, 2**20), b""):
            left = len(decoder.getstate()[0])
            try:
                decoder.decode(data)
            except UnicodeDecodeError as error:
                return before - left + error.start
            before += len(data)
    return before - len(decoder.getstate()[0])


def _jsonl(path: Path, keys: RowKeys) -> Iterator[Row]:
    number = 0
    with _lines(path) as lines:
        for raw in lines:
            if raw.isspace():
                lines.row_ends(number)
                continue
            values = _json_row(path, lines.number, lines.text)
            yield normalised(Row(number, values, path, lines.number, lines.text), keys)
            number += 1
            lines.row_ends(number)


def _json_row(path: Path, line: int, text: str) -> dict[str, Any]:
    remedy = "a manifest line is one complete JSON object"
    try:
        values = json.loads(text, object_pairs_hook=functools.partial(_object, path, line, text))
    except json.JSONDecodeError as error:
        span = Span(str(path), line, error.colno, line, error.colno + 1)
        raise UserError(BadRow(span, "JSON", error.msg[0].lower() + error.msg[1:], remedy)) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets in brackets without end
        span = Span(str(path), line, 1, line, 2)
        raise UserError(BadRow(span, "JSON", "a number or a nesting without end", remedy)) from None
    if not isinstance(values, dict):
        span = Span(str(path), line, 1, line, len(text) + 1)
        raise UserError(
            BadRow(span, "a JSON object", f"a {type(values).__name__}", "write one object of keys and values")
        )
    return values


def _object(path: Path, line: int, text: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of the row; Python would keep the last of two values of one key and say nothing."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            places = [match.span() for match in re.finditer(rf'"{re.escape(key)}"(?=\s*:)', text)]
            begin, end = places[1] if len(places) > 1 else (0, len(text))  # not there where it is written in escapes
            raise UserError(RepeatedKey(Span(str(path), line, begin + 1, line, end + 1), key))
        values[key] = value
    return values


def _csv(path: Path, keys: RowKeys) -> Iterator[Row]:
    with _lines(path) as lines:
        reader = csv.reader(lines, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            for column, name in enumerate(names):
                canonical_key(name, _named_span(path, lines.text, name), keys)
                if name in names[:column]:
                    raise UserError(RepeatedKey(_named_span(path, lines.text, name, names[:column].count(name)), name))
            number = 0
            for fields in reader:
                if fields:
                    yield _csv_row(Row(number, {}, path, lines.number, lines.text), names, fields, keys)
                    number += 1
                lines.row_ends(number)
        except csv.Error as error:
            span = Span(str(path), lines.number, 1, lines.number, 2)
            raise UserError(BadRow(span, "CSV", str(error), "quote fields that hold commas or quotes")) from None


def _csv_row(row: Row, names: Sequence[str], fields: Sequence[str], keys: RowKeys) -> Row:
    if len(fields) != len(names):
        reason = f"{len(fields)} fields under {len(names)} names"
        raise UserError(BadRow(row.span(), "complete", reason, "give every row as many fields as the first line"))
    values = {name: _csv_value(name, field, keys) for name, field in zip(names, fields, strict=True)}
    return normalised(replace(row, values=values), keys)


def _csv_value(name: str, field: str, keys: RowKeys) -> int | float | str | None:
    """CSV has no types: an empty field is absent, one that reads as an integer is one, except in captions and paths."""
    if not field.strip():
        return None
    key = keys.aliases.get(name, name)
    if key in keys.texts:
        return field
    for number in (int, float) if key in keys.fractions else (int,):
        with contextlib.suppress(ValueError):
            return number(field)
    return field.strip()


def _parquet(path: Path, keys: RowKeys) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(NoPyArrow(None, str(path))) from None
    with unpacking(path):
        _demand_listable(path, pyarrow.parquet.read_metadata(path))
        table = pyarrow.parquet.read_table(path)
        names, batches = table.column_names, table.to_batches()
    for column, name in enumerate(names):
        if name in names[:column]:
            raise UserError(RepeatedKey(Span(f"{path} (column {column + 1})", 1, 1, 1, 1), name))
    number = 0
    for batch in batches:
        with unpacking(path):
            listed = batch.to_pylist()
        for values in listed:
            yield parquet_row(path, number, values, keys)
            number += 1


@contextlib.contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """What pyarrow says of a damaged file in here names the file. Raises ``UserError``."""
    import pyarrow

    try:
        yield
    except UnicodeDecodeError:  # names of columns, and texts
        raise UserError(UnreadableManifest(None, str(path), "a text of it is not UTF-8")) from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or ["it is damaged"])[0]
        raise UserError(UnreadableManifest(None, str(path), reason)) from None


def _demand_listable(path: Path, metadata: Any) -> None:
    """Raises ``UserError`` where a list of all rows would be too large: a short file may unpack to a long one."""
    if metadata.num_rows > MOST_ROWS:
        raise UserError(ManifestTooLarge(None, str(path), MOST_ROWS, "rows"))
    if sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)) > LARGEST_FILE:
        raise UserError(ManifestTooLarge(None, str(path), LARGEST_FILE >> 20, "MiB when it is unpacked"))


def parquet_row(path: Path, number: int, values: Mapping[str, Any], keys: RowKeys = CLIP_KEYS) -> Row:
    # A column of integers with gaps is commonly stored as floating point, with NaN or null in the gaps.
    present = {key: None if value != value else value for key, value in values.items()}
    integral = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in present.items()}
    return normalised(Row(number, integral, path, number + 1, ""), keys)


def normalised(row: Row, keys: RowKeys = CLIP_KEYS) -> Row:
    """The row by canonical keys, without what is None. Raises ``UserError`` for an unknown or repeated key."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in row.values.items():
        name = canonical_key(key, row.span(key), keys)
        if value is None:
            continue
        if name in values:
            raise UserError(KeyTwice(row.span(key), name, next(a for a, n in keys.aliases.items() if n == name)))
        values[name] = value
        if name != key:
            written[name] = key
    return replace(row, values=values, written=written)


def canonical_key(key: str, span: Span, keys: RowKeys) -> str:
    """The key's canonical name. Raises ``UserError`` for an unknown key."""
    name = keys.aliases.get(key, key)
    if name not in keys.keys:
        near = close_to(key, (*keys.keys, *keys.aliases))
        suggestion = f"did you mean `{near[0]}`?" if near else f"the keys are {', '.join(keys.keys)}"
        raise UserError(UnknownKey(span, key, suggestion))
    return name


def _named_span(path: Path, header: str, name: str, before: int = 0) -> Span:
    """The name in a CSV file's first line, behind so many fields of the same name."""
    columns = [match.start() + 1 for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", header)]
    column = columns[before] if before < len(columns) else 1  # a quoted name may be written otherwise
    return Span(str(path), 1, column, 1, column + len(name))
