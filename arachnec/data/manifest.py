"""Manifests: the lists of clips to train on, as JSONL, CSV or Parquet."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from arachnec.data.clip import VideoClip, caption_tokens
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Span

ALIASES = {"num_frames": "frames", "text": "caption", "video": "path"}
KEYS = (
    *("frames", "height", "width", "text_tokens", "caption", "path", "id", "clips", "iteration", "start"),
    # How somebody else's system grouped these clips. Partitioning is a pass of ours, so it is read and not used.
    "micro_batch",
)
LEAST = {"frames": 1, "height": 1, "width": 1, "text_tokens": 0, "clips": 1, "start": 0}


@dataclass(frozen=True)
class NoManifest(Diagnostic):
    title: ClassVar[str] = "there is no manifest `{path}`"
    help: ClassVar[str] = "give a .jsonl, .csv or .parquet file that lists the clips"
    path: str


@dataclass(frozen=True)
class UnknownFormat(Diagnostic):
    title: ClassVar[str] = "`{path}` is not a manifest: the ending is `{suffix}`"
    help: ClassVar[str] = "manifests end in .jsonl, .csv or .parquet"
    path: str
    suffix: str


@dataclass(frozen=True)
class NoPyArrow(Diagnostic):
    title: ClassVar[str] = "reading `{path}` needs pyarrow, which is not installed"
    help: ClassVar[str] = "pip install 'arachnec[parquet]', or write the manifest as .jsonl"
    path: str


@dataclass(frozen=True)
class UnreadableManifest(Diagnostic):
    title: ClassVar[str] = "`{path}` cannot be read: {reason}"
    help: ClassVar[str] = "write the manifest again as UTF-8 .jsonl, .csv or .parquet"
    path: str
    reason: str


@dataclass(frozen=True)
class EmptyManifest(Diagnostic):
    title: ClassVar[str] = "the manifest `{path}` lists no clips"
    help: ClassVar[str] = 'add a line such as {{"frames": 81, "height": 480, "width": 832, "text_tokens": 226}}'
    path: str


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
class MissingKey(Diagnostic):
    title: ClassVar[str] = "the clip has no `{key}`"
    label: ClassVar[str] = "missing here"
    help: ClassVar[str] = "{remedy}"
    key: str
    remedy: str


@dataclass(frozen=True)
class BadValue(Diagnostic):
    title: ClassVar[str] = "`{key}` is {found}, expected {expected}"
    label: ClassVar[str] = "expected {expected}"
    help: ClassVar[str] = "{remedy}"
    key: str
    found: str
    expected: str
    remedy: str


@dataclass(frozen=True)
class DuplicateId(Diagnostic):
    title: ClassVar[str] = "two clips have the id `{id}`"
    label: ClassVar[str] = "the other is in row {row}, counted from 1"
    help: ClassVar[str] = "ids seed a clip's noise and must differ; leave `id` out to use the row's number"
    id: str | int
    row: int


@dataclass(frozen=True)
class Manifest:
    """The clips of each global batch, in order."""

    iterations: tuple[tuple[VideoClip, ...], ...]
    path: Path

    @property
    def clips(self) -> tuple[VideoClip, ...]:
        return tuple(clip for iteration in self.iterations for clip in iteration)


@dataclass(frozen=True)
class Row:
    """One row: its values under their first names, and where it stands. ``text`` is empty for Parquet."""

    number: int
    values: Mapping[str, Any]
    file: Path
    line: int
    text: str

    def span(self, key: str | None = None) -> Span:
        """The key in the row's text, or the whole row; a Parquet row's number stands by the file's name."""
        if not self.text:
            return Span(f"{self.file} (row {self.number + 1})", 1, 1, 1, 1)
        column = self.text.find(f'"{key}"') if key else -1
        if column < 0:
            return Span(str(self.file), self.line, 1, self.line, len(self.text) + 1)
        return Span(str(self.file), self.line, column + 1, self.line, column + len(f'"{key}"') + 1)


def read_manifest(path: str | Path, batch: int | None = None) -> Manifest:
    """Read a manifest; ``docs/your_videos.md`` describes its keys.

    Rows that carry ``iteration`` are grouped by it, in order of first appearance; otherwise every ``batch`` clips make
    one global batch (the last may be smaller: nothing is dropped), and without ``batch`` all clips make one. Sizes that
    a row with a ``path`` leaves out are read from the video's header. Raises ``UserError`` with file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(NoManifest(None, str(path)))
    rows = list(_rows(path))
    if not rows:
        raise UserError(EmptyManifest(None, str(path)))
    groups: dict[object, list[VideoClip]] = {}
    seen: dict[str, int] = {}
    grouped = "iteration" in rows[0].values
    for row in rows:
        group = _iteration(row, grouped)
        for clip in _clips(row):
            if str(clip.id) in seen:
                raise UserError(DuplicateId(row.span("id"), clip.id, seen[str(clip.id)] + 1))
            seen[str(clip.id)] = row.number
            groups.setdefault(group, []).append(clip)
    if grouped:
        return Manifest(tuple(map(tuple, groups.values())), path)
    (clips,) = groups.values()
    size = batch or len(clips)
    return Manifest(tuple(tuple(clips[i : i + size]) for i in range(0, len(clips), size)), path)


def write_manifest(manifest: Manifest, path: str | Path) -> None:
    """Write normalised JSONL: one line a clip, every known key, absolute paths. Reading it gives the same clips."""
    lines = []
    for number, iteration in enumerate(manifest.iterations):
        for clip in iteration:
            row = {
                "id": clip.id,
                "iteration": number,
                "frames": clip.frames,
                "height": clip.height,
                "width": clip.width,
                "text_tokens": clip.text_tokens,
                "caption": clip.caption,
                "path": None if clip.path is None else str(clip.path),
                "start": clip.start or None,
            }
            lines.append(json.dumps({k: v for k, v in row.items() if v is not None}, ensure_ascii=False))
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _rows(path: Path) -> Iterator[Row]:
    readers = {".jsonl": _jsonl, ".ndjson": _jsonl, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(UnknownFormat(None, str(path), path.suffix or "missing"))
    return reader(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(UnreadableManifest(None, str(path), f"not UTF-8 at byte {error.start}")) from None


def _jsonl(path: Path) -> Iterator[Row]:
    number = 0
    for line, raw in enumerate(_text(path).split("\n"), start=1):
        text = raw.rstrip("\r")
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            span = Span(str(path), line, error.colno, line, error.colno + 1)
            remedy = "a manifest line is one complete JSON object"
            raise UserError(BadRow(span, "JSON", error.msg[0].lower() + error.msg[1:], remedy)) from None
        if not isinstance(values, dict):
            span = Span(str(path), line, 1, line, len(text) + 1)
            raise UserError(
                BadRow(span, "a JSON object", f"a {type(values).__name__}", "write one object of keys and values")
            )
        yield _normalised(Row(number, values, path, line, text))
        number += 1


def _csv(path: Path) -> Iterator[Row]:
    text = _text(path)
    lines = text.splitlines()
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        for number, fields in enumerate(row for row in reader if row):
            line = reader.line_num
            span = Span(str(path), line, 1, line, len(lines[line - 1]) + 1)
            if len(fields) != len(names):
                reason = f"{len(fields)} fields under {len(names)} names"
                raise UserError(BadRow(span, "complete", reason, "give every row as many fields as the first line"))
            values = {name: _csv_value(name, field) for name, field in zip(names, fields, strict=True) if field.strip()}
            yield _normalised(Row(number, values, path, line, lines[line - 1]))
    except csv.Error as error:
        line = reader.line_num
        span = Span(str(path), line, 1, line, 2)
        raise UserError(BadRow(span, "CSV", str(error), "quote fields that hold commas or quotes")) from None


def _csv_value(name: str, field: str) -> int | str:
    """CSV has no types: a field that reads as an integer is one, except in captions and paths."""
    if ALIASES.get(name, name) in ("caption", "path"):
        return field
    try:
        return int(field)
    except ValueError:
        return field.strip()


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(NoPyArrow(None, str(path))) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(UnreadableManifest(None, str(path), str(error).splitlines()[0])) from None
    for number, values in enumerate(table.to_pylist()):
        # A column of integers with gaps is commonly stored as floating point, with NaN or null in the gaps.
        present = {k: v for k, v in values.items() if v is not None and v == v}
        whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in present.items()}
        yield _normalised(Row(number, whole, path, number + 1, ""))


def _normalised(row: Row) -> Row:
    values: dict[str, Any] = {}
    for key, value in row.values.items():
        name = ALIASES.get(key, key)
        if name not in KEYS:
            near = difflib.get_close_matches(key, (*KEYS, *ALIASES), n=1)
            suggestion = f"did you mean `{near[0]}`?" if near else f"the keys are {', '.join(KEYS)}"
            raise UserError(UnknownKey(row.span(key), key, suggestion))
        if value is None:
            continue
        if name in values:
            raise UserError(KeyTwice(row.span(key), name, next(a for a, n in ALIASES.items() if n == name)))
        values[name] = value
    return Row(row.number, values, row.file, row.line, row.text)


def _iteration(row: Row, grouped: bool) -> object:
    if ("iteration" in row.values) != grouped:
        remedy = "give `iteration` in every row, or in none"
        if grouped:
            raise UserError(MissingKey(row.span(), "iteration", remedy))
        raise UserError(
            BadValue(row.span("iteration"), "iteration", "given here", "no row or every row to have it", remedy)
        )
    value = row.values.get("iteration")
    if not isinstance(value, int | str | None) or isinstance(value, bool):
        raise UserError(_bad(row, "iteration", "a number or a name", "number the global batches from 0"))
    return value


def _clips(row: Row) -> Iterator[VideoClip]:
    path = _path(row)
    sizes = {key: _integer(row, key) for key in ("frames", "height", "width")}
    start = _integer(row, "start") or 0
    if None in sizes.values():
        sizes = _probed(row, path, start, sizes)
    caption = row.values.get("caption")
    if not isinstance(caption, str | None):
        raise UserError(_bad(row, "caption", "a string", "put the caption in quotes"))
    text_tokens = _integer(row, "text_tokens")
    if text_tokens is None:
        if caption is None:
            remedy = "add `caption`, or `text_tokens` (0 for a model that reads no text)"
            raise UserError(MissingKey(row.span(), "text_tokens", remedy))
        text_tokens = caption_tokens(caption)
    given = row.values.get("id", row.number)
    if not isinstance(given, int | str) or isinstance(given, bool) or given == "":
        raise UserError(_bad(row, "id", "a string or a number", "leave `id` out to use the row's number"))
    count = _integer(row, "clips") or 1
    frames, height, width = (sizes[key] or 0 for key in ("frames", "height", "width"))
    for copy in range(count):
        id = given if count == 1 else f"{given}.{copy}"
        yield VideoClip(id, frames, height, width, text_tokens, caption, path, start)


def _path(row: Row) -> Path | None:
    value = row.values.get("path")
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(_bad(row, "path", "a string", "put the path in quotes"))
    path = (row.file.parent / value).absolute()
    if not path.is_file():
        remedy = "correct the path; a relative one starts at the manifest's folder"
        raise UserError(BadValue(row.span("path"), "path", repr(value), "a file that is there", remedy))
    return path


def _probed(row: Row, path: Path | None, start: int, sizes: Mapping[str, int | None]) -> dict[str, int | None]:
    if path is None or path.suffix == ".safetensors":
        key = next(key for key, value in sizes.items() if value is None)
        raise UserError(MissingKey(row.span(), key, f"add `{key}`, or the `path` of a video to read it from"))
    from arachnec.data.video import probe

    header = probe(path)
    if start >= header.frames:
        remedy = f"the video has {header.frames} frames, counted from 0"
        raise UserError(BadValue(row.span("start"), "start", str(start), f"less than {header.frames}", remedy))
    found = {"frames": header.frames - start, "height": header.height, "width": header.width}
    return {key: found[key] if value is None else value for key, value in sizes.items()}


def _integer(row: Row, key: str) -> int | None:
    value = row.values.get(key)
    if value is None:
        return None
    least = LEAST[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(_bad(row, key, f"an integer of at least {least}", f"write `{key}` as a whole number"))
    if value < least:
        remedy = "an image is a clip of 1 frame" if key == "frames" else f"the smallest `{key}` is {least}"
        raise UserError(_bad(row, key, f"at least {least}", remedy))
    return value


def _bad(row: Row, key: str, expected: str, remedy: str) -> BadValue:
    written = next((name for name, first in ALIASES.items() if first == key and f'"{name}"' in row.text), key)
    return BadValue(row.span(written), key, repr(row.values[key]), expected, remedy)
