"""Manifest rows. In: a JSON, JSONL, CSV or Parquet file. Out: rows by known keys, each with its place in the file."""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from arachnec.data.columns import CLIP_KEYS, FILES, RESOLUTION, VALUES, RowKeys
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.limits import LARGEST_MANIFEST, LONGEST_ROW, MOST_LINES, MOST_ROWS
from arachnec.ir.nodes import Span

FIRST = 1000  # rows, one of which must have a column that the user names
ARRAY = "a .json file is one array of objects, or one object a line"
ENDLESS = "a number or a nesting without end"
_ARRAY = re.compile(r"\s*\[\s*(\{|\]|$)")  # where it begins: a row that is an array of numbers is a mistake
# A number that no name is: 00123, 1_0 and 1e10 may be parts of one.
_NUMBER = re.compile(
    r"-?(0|[1-9]\d*)|[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]\d+|[-+]?(nan|inf)", re.IGNORECASE
)
_SPACE = re.compile(r"[ \t\r\n]*")


def no_manifest_error(path: str) -> UserError:
    return user_error(
        f"there is no manifest `{path}`",
        help="give a .jsonl, .json, .csv or .parquet file, with a row for each clip or request",
    )


def no_py_arrow_error(path: str) -> UserError:
    return user_error(
        f"reading `{path}` needs pyarrow, which is not installed",
        help="pip install 'pyarrow>=15', or write the manifest as .jsonl",
    )


def unreadable_manifest_error(path: str, reason: str) -> UserError:
    return user_error(
        f"`{path}` cannot be read: {reason}", help="write the manifest again as UTF-8 .jsonl, .csv or .parquet"
    )


def manifest_too_large_error(path: str, most: int, what: str) -> UserError:
    return user_error(
        f"`{path}` is too large to list: it has more than {most} {what}",
        help="give fewer rows, or write clips as .parquet, of which a run reads the rows that it draws",
    )


def bad_row_error(span: Span | None, expected: str, reason: str, remedy: str) -> UserError:
    return user_error(f"this row is not {expected}", label=reason, help=remedy, span=span)


def repeated_key_error(span: Span | None, key: str) -> UserError:
    return user_error(
        f"`{key}` is given twice",
        label="the second one",
        help="keep one of them; to list another clip, write another row",
        span=span,
    )


@dataclass(frozen=True)
class Row:
    """One row: its values by canonical key, and its place. ``text`` is empty for Parquet; ``written`` are the keys that
    the row calls otherwise. ``extras`` and ``files`` are its columns that are no keys, and the paths among them."""

    number: int
    values: Mapping[str, Any]
    file: Path
    line: int
    text: str
    column: int = 1  # where its text begins in its first line
    written: Mapping[str, str] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)

    def span(self, key: str | None = None) -> Span:
        """The key in the row's text, or the whole row; a Parquet row's number stands by the file's name."""
        if not self.text:
            return Span(f"{self.file} (row {self.number + 1})", 1, 1, 1, 1)
        place = self.text.find(f'"{key}"') if key else -1
        return self.part(place, place + len(f'"{key}"')) if place >= 0 else self.part(0, len(self.text))

    def part(self, begin: int, end: int) -> Span:
        """A part of the row's text, of one line; up to its line's end where there are more."""
        before, line = self.text.count("\n", 0, begin), self.text.rfind("\n", 0, begin) + 1
        stop = self.text.find("\n", begin, end)
        length = (end if stop < 0 else stop) - begin
        column = begin - line + (self.column if before == 0 else 1)
        return Span(str(self.file), self.line + before, column, self.line + before, column + length)


def read_rows(path: Path, keys: RowKeys = CLIP_KEYS) -> Iterator[Row]:
    """Rows in the file's order, by canonical keys. Raises ``UserError`` for a row that cannot be read."""
    if path.is_dir():
        raise user_error(
            f"`{path}` is a folder, and clips are listed by a manifest",
            help=f"`arachnec manifest {path} -o clips.jsonl` writes one of the videos in it",
        )
    if not path.is_file():
        raise no_manifest_error(str(path))
    readers = {".jsonl": _json, ".ndjson": _json, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise user_error(
            f"`{path}` is not a manifest: its extension is `{path.suffix or 'missing'}`",
            help="manifests end in .jsonl, .csv or .parquet; a .json file is one array of rows",
        )
    return _normalised(path, reader(path, keys), keys)


def _normalised(path: Path, rows: Iterable[Row], keys: RowKeys) -> Iterator[Row]:
    """The rows by canonical keys. Raises ``UserError`` where the first ones lack a column that the user names."""
    rows = iter(rows)
    first = list(itertools.islice(rows, FIRST)) if keys.columns.required else []
    if first:
        keys.columns.require_present(str(path), list(dict.fromkeys(name for row in first for name in row.values)))
    for row in itertools.chain(first, rows):
        yield normalised(row, keys)


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
            raise unreadable_manifest_error(str(self.path), f"not UTF-8 at byte {_wrong_byte(self.path)}") from None
        self.taken += len(line)
        if not line:
            raise StopIteration
        self.number, self.text = self.number + 1, line.rstrip("\r\n")
        if self.number > MOST_LINES:
            raise manifest_too_large_error(str(self.path), MOST_LINES, "lines")
        if self.taken > LONGEST_ROW:
            reason = f"it has more than {LONGEST_ROW} characters"
            span = Span(str(self.path), self.number, 1, self.number, 2)
            raise bad_row_error(span, "a row", reason, "end every row with a line's end, and close every quote")
        return line

    def row_ends(self, rows: int) -> None:
        self.taken = 0
        if rows > MOST_ROWS:
            raise manifest_too_large_error(str(self.path), MOST_ROWS, "rows")


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[_Lines]:
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            raise manifest_too_large_error(str(path), LARGEST_MANIFEST >> 20, "MiB")
        with path.open(encoding="utf-8-sig") as file:
            yield _Lines(path, file)
    except OSError as error:
        raise unreadable_manifest_error(str(path), str(error.strerror)) from None


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


def _json(path: Path, keys: RowKeys) -> Iterator[Row]:
    """Rows of one JSON object a line, or of one array of objects."""
    number, array = 0, False
    with _lines(path) as lines:
        for raw in lines:
            if raw.isspace():
                lines.row_ends(number)
                continue
            if number == 0 and _ARRAY.match(raw):
                array = True
                break
            yield _json_row(Row(number, {}, path, lines.number, lines.text))
            number += 1
            lines.row_ends(number)
    if array:
        yield from _json_array(path)


def _json_array(path: Path) -> Iterator[Row]:
    """The elements of the file's array, one after the other."""
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    if any("\udc80" <= character <= "\udcff" for character in text):
        raise unreadable_manifest_error(str(path), f"not UTF-8 at byte {_wrong_byte(path)}")
    decoder, places = json.JSONDecoder(), _Places(path, text)
    here, number = text.index("[") + 1, 0
    while True:
        here = _SPACE.match(text, here).end()  # type: ignore[union-attr]
        if text[here : here + 1] == "]":
            break
        if number:
            if text[here : here + 1] != ",":
                raise bad_row_error(places.at(here), "JSON", "expecting ',' delimiter", ARRAY)
            here = _SPACE.match(text, here + 1).end()  # type: ignore[union-attr]
        try:
            _, end = decoder.raw_decode(text, here)
        except json.JSONDecodeError as error:
            reason = error.msg[0].lower() + error.msg[1:]
            raise bad_row_error(places.at(error.pos), "JSON", reason, ARRAY) from None
        except (ValueError, RecursionError):
            raise bad_row_error(places.at(here), "JSON", ENDLESS, ARRAY) from None
        span = places.at(here)
        yield _json_row(Row(number, {}, path, span.line, text[here:end], span.column))
        here, number = end, number + 1
        if number > MOST_ROWS:
            raise manifest_too_large_error(str(path), MOST_ROWS, "rows")
    rest = _SPACE.match(text, here + 1).end()  # type: ignore[union-attr]
    if rest < len(text):
        raise bad_row_error(places.at(rest), "JSON", "more behind the array", ARRAY)


@dataclass
class _Places:
    """Line and column of places in a text, asked for in ascending order."""

    path: Path
    text: str
    line: int = 1
    start: int = 0  # of the line

    def at(self, place: int) -> Span:
        lines = self.text.count("\n", self.start, place)
        if lines:
            self.line, self.start = self.line + lines, self.text.rfind("\n", 0, place) + 1
        column = place - self.start + 1
        return Span(str(self.path), self.line, column, self.line, column + 1)


def _json_row(row: Row) -> Row:
    remedy = "a manifest line is one complete JSON object"
    try:
        values = json.loads(row.text, object_pairs_hook=functools.partial(_object, row))
    except json.JSONDecodeError as error:
        reason = error.msg[0].lower() + error.msg[1:]
        raise bad_row_error(row.part(error.pos, error.pos + 1), "JSON", reason, remedy) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets in brackets without end
        raise bad_row_error(row.part(0, 1), "JSON", ENDLESS, remedy) from None
    if not isinstance(values, dict):
        raise bad_row_error(
            row.span(), "a JSON object", f"a {type(values).__name__}", "write one object of keys and values"
        )
    return replace(row, values=values)


def _object(row: Row, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of the row; Python would keep the last of two values of one key and say nothing."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            places = [match.span() for match in re.finditer(rf'"{re.escape(key)}"(?=\s*:)', row.text)]
            # not there where it is written in escapes
            raise repeated_key_error(row.part(*(places[1] if len(places) > 1 else (0, len(row.text)))), key)
        values[key] = value
    return values


def _csv(path: Path, keys: RowKeys) -> Iterator[Row]:
    with _lines(path) as lines:
        reader = csv.reader(lines, strict=True)
        try:
            names = [name.strip() for name in next(reader, [])]
            _require_commas(path, lines.text, names)
            for column, name in enumerate(names):
                keys.require_place(name, _named_span(path, lines.text, name))
                if name in names[:column]:
                    raise repeated_key_error(_named_span(path, lines.text, name, names[:column].count(name)), name)
            number = 0
            for fields in reader:
                if fields:
                    yield _csv_row(Row(number, {}, path, lines.number, lines.text), names, fields, keys)
                    number += 1
                lines.row_ends(number)
        except csv.Error as error:
            span = Span(str(path), lines.number, 1, lines.number, 2)
            raise bad_row_error(span, "CSV", str(error), "quote fields that hold commas or quotes") from None


def _csv_row(row: Row, names: Sequence[str], fields: Sequence[str], keys: RowKeys) -> Row:
    if len(fields) != len(names):
        reason = f"{len(fields)} fields under {len(names)} names"
        raise bad_row_error(row.span(), "complete", reason, "give every row as many fields as the first line")
    values = {name: _csv_value(name, field, keys) for name, field in zip(names, fields, strict=True)}
    return replace(row, values=values)


def _csv_value(name: str, field: str, keys: RowKeys) -> int | float | str | None:
    """CSV has no types: an empty field is absent, one that reads as an integer is one, except in captions and paths."""
    if not field.strip():
        return None
    key, _ = keys.place(name) or (name, 0)
    if key in keys.texts or key == FILES:
        return field
    if key in (VALUES, "id") and not _NUMBER.fullmatch(field.strip()):
        return field.strip()
    for number in (int, float) if key in (*keys.fractions, VALUES) else (int,):
        with contextlib.suppress(ValueError):
            return number(field)
    with contextlib.suppress(ValueError):
        if key in keys.counts and (whole := float(field)).is_integer():
            return int(whole)
    return field.strip()


def _require_commas(path: Path, header: str, names: Sequence[str]) -> None:
    """Raises ``UserError`` for a file that is separated by something else."""
    for separator, word, written in ((";", "semicolons", ";"), ("\t", "tabs", "\\t"), ("|", "bars", "|")):
        if separator in header and (len(names) == 1 or separator in names[0]):
            raise user_error(
                f"`{path}` is separated by {word}, and a .csv file is by commas",
                label="no comma in the names of its columns",
                help=(
                    f"write it again with commas: pandas.read_csv({path.name!r}, "
                    f"sep={written!r}).to_csv({path.name!r}, index=False)"
                ),
                span=Span(str(path), 1, 1, 1, len(header) + 1),
            )


def _parquet(path: Path, keys: RowKeys) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise no_py_arrow_error(str(path)) from None
    with unpacking(path):
        _demand_listable(path, pyarrow.parquet.read_metadata(path))
        table = pyarrow.parquet.read_table(path)
        names, batches = table.column_names, table.to_batches()
    for column, name in enumerate(names):
        if name in names[:column]:
            raise repeated_key_error(Span(f"{path} (column {column + 1})", 1, 1, 1, 1), name)
    number = 0
    for batch in batches:
        with unpacking(path):
            listed = batch.to_pylist()
        for values in listed:
            yield parquet_row(path, number, values)
            number += 1


@contextlib.contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """What pyarrow says of a damaged file in here names the file. Raises ``UserError``."""
    import pyarrow

    try:
        yield
    except UnicodeDecodeError:  # names of columns, and texts
        raise unreadable_manifest_error(str(path), "a text of it is not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or ["it is damaged"])[0]
        raise unreadable_manifest_error(str(path), reason) from None


def _demand_listable(path: Path, metadata: Any) -> None:
    """Raises ``UserError`` where a list of all rows would be too large: a short file may unpack to a long one."""
    if metadata.num_rows > MOST_ROWS:
        raise manifest_too_large_error(str(path), MOST_ROWS, "rows")
    if sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)) > LARGEST_MANIFEST:
        raise manifest_too_large_error(str(path), LARGEST_MANIFEST >> 20, "MiB when it is unpacked")


def parquet_row(path: Path, number: int, values: Mapping[str, Any]) -> Row:
    """The row by the names of its columns."""
    # A column of integers with gaps is commonly stored as floating point, with NaN or null in the gaps.
    present = {key: None if value != value else value for key, value in values.items()}
    integral = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in present.items()}
    return Row(number, integral, path, number + 1, "")


def normalised(row: Row, keys: RowKeys = CLIP_KEYS) -> Row:
    """The row by canonical keys, without what is None. Of several columns for one key the first that is no empty text
    has it; the others are ``extras``. Raises ``UserError`` for an unknown key, and for a repeated one where there are
    no extras."""
    given: dict[str, list[tuple[bool, int, bool, str]]] = {}
    for name, value in row.values.items():
        key, rank = keys.require_place(name, row.span(name))
        if value is not None:
            given.setdefault(key, []).append((value == "", rank, name != name.lower(), name))
    extras = given.pop(VALUES, [])
    files = {name: row.values[name] for *_, name in given.pop(FILES, []) if row.values[name] != ""}
    first = {key: min(names)[-1] for key, names in given.items()}
    others = [(key, name) for key, names in given.items() for *_, name in names if name != first[key]]
    files |= {name: row.values[name] for key, name in others if key == "path" and row.values[name] != ""}
    if others and not keys.extras:
        key, name = others[-1]
        raise user_error(
            f"`{key}` and `{name if name != key else first[key]}` are two names of one thing",
            label="given twice",
            help=f"keep `{key}`",
            span=row.span(name),
        )
    more = {
        name: row.values[name]
        for name in (*(name for *_, name in extras), *(name for key, name in others if key != "path"))
    }
    values = {key: row.values[name] for key, name in first.items()}
    if isinstance(more.get(RESOLUTION), dict):
        values = {key: size for key in ("height", "width") if (size := more[RESOLUTION].get(key)) is not None} | values
    written = {key: name for key, name in first.items() if name != key}
    return replace(row, values=values, written=written, extras=more, files=files)


def _named_span(path: Path, header: str, name: str, before: int = 0) -> Span:
    """The name in a CSV file's first line, behind so many fields of the same name."""
    columns = [match.start() + 1 for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", header)]
    column = columns[before] if before < len(columns) else 1  # a quoted name may be written otherwise
    return Span(str(path), 1, column, 1, column + len(name))
