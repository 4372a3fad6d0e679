"""Manifests: the lists of clips to train on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from arachnec.data.clip import VideoClip, caption_tokens, with_unique_names
from arachnec.data.columns import CLIP_KEYS, FILES, NAMES, VALUES, Columns
from arachnec.data.rows import Row, read_rows
from arachnec.data.video import VideoHeader, frames_taken, read_header
from arachnec.ir.diagnostic import Diagnostic, Span, UserError, user_error
from arachnec.ir.limits import (
    HIGHEST_RATE,
    LATEST_START,
    LOWEST_RATE,
    MOST_COPIES,
    MOST_COUNTED,
    MOST_IN_BATCH,
    MOST_SAMPLING_STEPS,
)

LEAST = dict.fromkeys(("frames", "height", "width", "clips", "stride", "steps"), 1)
LEAST |= dict.fromkeys(("text_tokens", "start", "seed"), 0)
MOST = dict.fromkeys(LEAST, MOST_COUNTED) | {"start": LATEST_START, "steps": MOST_SAMPLING_STEPS, "seed": 2**63 - 1}


def missing_key_error(span: Span | None, what: str, key: str, remedy: str) -> UserError:
    return user_error(f"the {what} has no `{key}`", label="missing here", help=remedy, span=span)


@dataclass(frozen=True)
class BadValue(Diagnostic):
    title = "`{key}` is {found}, expected {expected}"
    label = "expected {expected}"
    help = "{remedy}"
    key: str
    found: str
    expected: str
    remedy: str


def same_id_error(span: Span | None, what: str, id: str | int, row: int, reason: str) -> UserError:
    return user_error(
        f"two {what}s have the id `{id}`",
        label=f"the other is in row {row}, counted from 1",
        help=f"{reason}; leave `id` out to use the row's number",
        span=span,
    )


def integer(row: Row, key: str) -> int | None:
    """The row's whole number; None where it has none. Raises ``UserError`` out of its bounds."""
    value = row.values.get(key)
    if value is None:
        return None
    least = LEAST[key]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(bad_value(row, key, f"an integer of at least {least}", f"write `{key}` as a whole number"))
    if value < least:
        remedy = "an image is a clip of 1 frame" if key == "frames" else f"the smallest `{key}` is {least}"
        raise UserError(bad_value(row, key, f"at least {least}", remedy))
    if value > MOST[key]:
        raise UserError(bad_value(row, key, f"at most {MOST[key]}", f"correct `{key}`"))
    return value


def bad_value(row: Row, key: str, expected: str, remedy: str) -> BadValue:
    """The diagnostic at the key of the row, under whichever name it is written there."""
    shown = repr(row.values[key])
    return BadValue(
        row.span(row.written.get(key, key)), key, shown if len(shown) <= 80 else f"{shown[:77]}...", expected, remedy
    )


def _is_text(value: str) -> bool:
    """Whether it has no half of a surrogate pair, as JSON's escapes can."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def rate(row: Row, key: str) -> float | None:
    """The row's frames a second; None where it has none. Raises ``UserError`` for what is no rate of a video."""
    value = row.values.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not LOWEST_RATE <= value <= HIGHEST_RATE:
        expected = f"a number of frames a second, from {LOWEST_RATE} to {HIGHEST_RATE}"
        raise UserError(bad_value(row, key, expected, f"write `{key}` as a number, such as 16 or 29.97"))
    return float(value)


def text(row: Row, key: str) -> str | None:
    """The row's text; None where it has none. Raises ``UserError`` for what is none or cannot be written."""
    value = row.values.get(key)
    if not isinstance(value, str | None):
        raise UserError(bad_value(row, key, "a string", f"put the {key.replace('_', ' ')} in quotes"))
    if value is not None and not _is_text(value):
        raise UserError(bad_value(row, key, "text that UTF-8 can hold", "write the characters themselves, unescaped"))
    return value


def identifier(row: Row) -> str | int:
    """The row's ``id``, else its number. Raises ``UserError``."""
    value = row.values.get("id", row.number)
    if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
        raise UserError(bad_value(row, "id", "a string or a number", "leave `id` out to use the row's number"))
    if isinstance(value, str) and not _is_text(value):
        raise UserError(bad_value(row, "id", "text that UTF-8 can hold", "write the characters themselves, unescaped"))
    return value


def texts(row: Row, key: str) -> tuple[str, ...]:
    """The row's text, or those of its list; empty where it has none. Raises ``UserError`` as ``text``."""
    value = row.values.get(key)
    if not isinstance(value, list):
        one = text(row, key)
        return () if one is None else (one,)
    if not value or not all(isinstance(item, str) and _is_text(item) for item in value):
        raise UserError(bad_value(row, key, "a text or a list of texts", f"put the {key} in quotes"))
    return tuple(value)


def tokens_of_text(row: Row, what: str, captions: Sequence[str]) -> int:
    """The row's ``text_tokens``, else as many as its longest caption has. Raises ``UserError`` where there is
    neither."""
    tokens = integer(row, "text_tokens")
    if tokens is not None:
        return tokens
    if not captions:
        remedy = "add `caption`, or `text_tokens` (0 for a model that reads no text)"
        raise missing_key_error(row.span(), what, "text_tokens", remedy)
    return max(map(caption_tokens, captions))


ALL: Final = "all"  # clips make one global batch
Batch: TypeAlias = int | Literal["all"] | None  # clips in a global batch; None where nothing says how many
CLIP = "clip"  # what a row stands for, in messages
SEEDS = "ids seed a clip's noise and must differ"


@dataclass(frozen=True)
class Manifest:
    """The clips of each global batch, in order."""

    iterations: tuple[tuple[VideoClip, ...], ...]
    path: Path
    grouped: bool = False  # by the key `iteration`
    extras: tuple[str, ...] = ()  # columns that are no keys

    @property
    def clips(self) -> tuple[VideoClip, ...]:
        return tuple(clip for iteration in self.iterations for clip in iteration)

    @property
    def notes(self) -> list[str]:
        """What a person should know of how it was read."""
        named = [f"`{name}`" for name in self.extras if name]  # pandas writes an index under no name
        if not named:
            return []
        are, them = ("is no key", "it") if len(named) == 1 else ("are no keys", "them")
        return [f"note: {', '.join(named)} of {self.path} {are} of a clip: `sample` finds {them} in `clip.values`"]


def demand_plannable(manifest: Manifest) -> Manifest:
    """The manifest itself. Raises ``UserError`` for a batch of more clips than are planned at once."""
    for number, clips in enumerate(manifest.iterations):
        if len(clips) > MOST_IN_BATCH:
            raise user_error(
                f"global batch {number} of `{manifest.path!s}` has {len(clips)} clips, and at most "
                f"{MOST_IN_BATCH} are planned at once",
                help=(
                    "give a smaller `--batch` (without one all clips make one); `accumulate` makes an optimizer "
                    "step of several"
                ),
            )
    return manifest


def read_manifest(path: str | Path, batch: Batch = None, columns: str = "") -> Manifest:
    """Read a manifest; ``docs/your_videos.md`` describes its keys. ``columns`` says which are read, as
    ``caption=prompt,path=video``.

    Rows that carry ``iteration`` are grouped by it, in order of first appearance; otherwise every ``batch`` clips make
    one global batch (the last may be smaller: nothing is dropped), and without ``batch``, or with ``all``, all clips
    make one. Sizes that a row with a ``path`` leaves out are read from the video's header. Raises ``UserError`` with
    file and line.
    """
    path = Path(path)
    groups: dict[object, list[VideoClip]] = {}
    seen: dict[str, int] = {}
    grouped: bool | None = None
    copies = 0
    extras: dict[str, None] = {}
    for row in read_rows(path, replace(CLIP_KEYS, columns=Columns.of(columns))):
        extras |= dict.fromkeys((*row.extras, *row.files))
        grouped = "iteration" in row.values if grouped is None else grouped
        copies = _few_copies(row, copies)
        group = _iteration(row, grouped)
        for clip in clips_of_row(row):
            if str(clip.id) in seen:
                raise same_id_error(row.span("id"), CLIP, clip.id, seen[str(clip.id)] + 1, SEEDS)
            seen[str(clip.id)] = row.number
            groups.setdefault(group, []).append(clip)
    if grouped is None:
        raise user_error(
            f"the manifest `{path}` lists no clips",
            help='add a line such as {"frames": 81, "height": 480, "width": 832, "text_tokens": 226}',
        )
    clips = with_unique_names([clip for group in groups.values() for clip in group])
    sizes = [len(group) for group in groups.values()] if grouped else _batches(len(clips), batch)
    ends = itertools.accumulate(sizes)
    iterations = tuple(tuple(clips[end - size : end]) for size, end in zip(sizes, ends, strict=True))
    return Manifest(iterations, path, grouped, tuple(extras))


def _batches(clips: int, batch: Batch) -> list[int]:
    """How many clips are in each global batch."""
    size = clips if batch is None or batch == ALL else batch
    return [min(size, clips - first) for first in range(0, clips, size)]


def _few_copies(row: Row, before: int) -> int:
    """With those of the rows before. Raises ``UserError`` where they are too many, before there is any."""
    copies = before + (integer(row, "clips") or 0)
    if copies > MOST_COPIES:
        raise UserError(bad_value(row, "clips", f"at most {MOST_COPIES} in all rows together", "list fewer clips"))
    return copies


def _iteration(row: Row, grouped: bool) -> object:
    if ("iteration" in row.values) != grouped:
        remedy = "give `iteration` in every row, or in none"
        if grouped:
            raise missing_key_error(row.span(), CLIP, "iteration", remedy)
        raise UserError(
            BadValue(row.span("iteration"), "iteration", "given here", "no row or every row to have it", remedy)
        )
    value = row.values.get("iteration")
    if not isinstance(value, int | str | None) or isinstance(value, bool):
        raise UserError(bad_value(row, "iteration", "a number or a name", "number the global batches from 0"))
    return value


def clips_of_row(row: Row) -> Iterator[VideoClip]:
    """The clips of a row: one, or as many equal ones as it says. Raises ``UserError`` for a value that cannot be."""
    path = _path(row)
    sizes = {key: integer(row, key) for key in ("frames", "height", "width")}
    start, stride = integer(row, "start") or 0, integer(row, "stride") or 1
    fps, target_fps = rate(row, "fps"), rate(row, "target_fps")
    if target_fps is not None and stride > 1:
        remedy = "frames are taken by time, or by number: keep one of the two"
        raise UserError(BadValue(row.span("stride"), "stride", str(stride), "no `stride` beside `target_fps`", remedy))
    if None in sizes.values():
        path, header = _header(row, path, start, sizes)
        taken = None if sizes["frames"] else frames_taken(path, start, target_fps, stride, header.frames)
        probed = {"frames": taken, "height": header.height, "width": header.width}
        sizes = {key: probed[key] if value is None else value for key, value in sizes.items()}
        fps = fps or header.fps
    captions = texts(row, "caption")
    text_tokens, row_id = tokens_of_text(row, CLIP, captions), identifier(row)
    cached = _encoded(row)
    count = integer(row, "clips") or 1
    frames, height, width = (sizes[key] or 0 for key in ("frames", "height", "width"))
    for copy in range(count):
        yield VideoClip(
            row_id if count == 1 else f"{row_id}.{copy}",
            *(frames, height, width, text_tokens),
            captions[0] if captions else None,
            path,
            start,
            cached=cached,
            values=_values(row),
            captions=captions if len(captions) > 1 else (),
            counted="text_tokens" not in row.values,
            fps=fps,
            target_fps=target_fps,
            stride=stride,
        )


def _path(row: Row) -> Path | None:
    value = row.values.get("path")
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserError(bad_value(row, "path", "a string", "put the path in quotes"))
    return _file_at(row, "path", value)


def _values(row: Row) -> dict[str, Any]:
    """What the columns say that are no keys; a file's place is a path, and several are a tuple of them."""
    files: dict[str, Any] = {}
    for name, value in _objects_opened(row.files).items():
        places = value if isinstance(value, list) else [value]
        if not all(isinstance(place, str) for place in places):
            files[name] = value
            continue
        paths = tuple(_extra_file(row, name, place) for place in places)
        files[name] = paths if isinstance(value, list) else paths[0]
    return {name: _plain(value) for name, value in _objects_opened(row.extras).items()} | files


def _objects_opened(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns, with those in the objects ``values`` and ``files``, as `arachnec cache` writes them."""
    opened: dict[str, Any] = {}
    for name, value in columns.items():
        opened |= value if name in (VALUES, FILES) and isinstance(value, dict) else {name: value}
    return opened


def _plain(value: object) -> object:
    """A value as JSON has it; what a Parquet file has beyond that, such as a date, as text."""
    return value if isinstance(value, bool | int | float | str | list | dict | None) else str(value)


def _extra_file(row: Row, column: str, value: str) -> Path:
    path = (row.file.parent / value).absolute()
    if column not in NAMES["path"] and not _is_file(path):
        other = f"what is no file is asked for by --columns values={column}"
        remedy = f"correct the path; a relative one starts at the manifest's folder; {other}"
        raise UserError(BadValue(row.span(column), column, repr(value)[:200], "a file that is there", remedy))
    return path


def _file_at(row: Row, key: str, value: str) -> Path:
    path = (row.file.parent / value).absolute()
    if not _is_file(path):
        remedy = "correct the path; a relative one starts at the manifest's folder"
        raise UserError(BadValue(row.span(key), key, repr(value)[:200], "a file that is there", remedy))
    return path


def _encoded(row: Row) -> dict[str, Path]:
    """The files of what encoders made of the clip beforehand, by encoder."""
    value = row.values.get("encoded")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(path, str) for path in value.values()):
        remedy = "`arachnec cache` writes it; a manifest that has it is JSONL"
        raise UserError(bad_value(row, "encoded", "an object of encoders and files", remedy))
    return {name: _file_at(row, "encoded", path) for name, path in value.items()}


def _header(row: Row, path: Path | None, start: int, sizes: Mapping[str, int | None]) -> tuple[Path, VideoHeader]:
    """A row's video and its header, for the sizes that the row leaves out. Raises ``UserError`` without a video."""
    if path is None or path.suffix == ".safetensors":
        key = next(key for key, value in sizes.items() if value is None)
        raise missing_key_error(row.span(), CLIP, key, f"add `{key}`, or the `path` of a video to read it from")
    header = read_header(path)
    if start >= header.frames:
        remedy = f"the video has {header.frames} frames, counted from 0"
        raise UserError(BadValue(row.span("start"), "start", str(start), f"less than {header.frames}", remedy))
    return path, header


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, or in a folder that may not be read
        return False
