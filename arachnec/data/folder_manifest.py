"""A folder of videos and stills as a manifest's rows.

In: the folder; a table of captions, where there is one. Out: a row a file, with its size and length as the header has
them and its caption, and the files that cannot be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arachnec.data.columns import CLIP_KEYS, Columns
from arachnec.data.manifest import texts
from arachnec.data.rows import read_rows
from arachnec.data.video import read_header
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.long_computations import Reporter, unreported

SUFFIXES = frozenset(
    (
        *(".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".mts", ".wmv", ".flv"),
        *(".3gp", ".ogv", ".y4m", ".gif", ".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"),
    )
)


@dataclass(frozen=True)
class FolderRows:
    """``rows`` of a manifest; the reasons why files are ``skipped``; how many rows are ``without_caption``, and how
    many captions of the table are of ``no_file``."""

    rows: tuple[Mapping[str, Any], ...]
    skipped: Mapping[Path, str]
    without_caption: int
    no_file: int


def list_folder(
    folder: Path, beside: Path, captions: Path | None = None, columns: str = "", reporter: Reporter = unreported
) -> FolderRows:
    """The rows of a manifest that lies in the folder ``beside``: to files below it paths are relative.

    Captions are those of the table ``captions``, else of a text file of the same stem, else empty. ``columns`` says
    which columns of the table are read. Raises ``UserError`` for a folder without files that can be read.
    """
    if not folder.is_dir():
        raise user_error(
            f"there is no folder `{folder}`",
            help="give the folder of the videos; those of the folders in it are listed, too",
        )
    files = list(_files(folder))
    table = {} if captions is None else _table(captions, folder, columns)
    rows: list[dict[str, Any]] = []
    skipped: dict[Path, str] = {}
    used: set[int] = set()
    for number, path in enumerate(files, start=1):
        reporter(f"reading {number} of {len(files)} files")
        try:
            header = read_header(path)
            entry = next((table[key] for key in (str(path.resolve()), path.name, path.stem) if key in table), None)
            caption = _text_beside(path) if entry is None else entry.caption
            str(path).encode()
        except UserError as error:
            skipped[path] = error.diagnostics[0].message
            continue
        except UnicodeError:
            skipped[path] = "its name or its caption is not UTF-8"
            continue
        used |= set() if entry is None else {entry.row}
        place = path.absolute()
        inside = place.is_relative_to(beside.absolute())
        sizes: dict[str, float] = {"frames": header.frames, "height": header.height, "width": header.width}
        sizes |= {} if header.fps is None else {"fps": header.fps}
        rows.append(
            {"path": str(place.relative_to(beside.absolute()) if inside else place), **sizes, "caption": caption}
        )
    if not rows:
        first = next(iter(skipped.items()), None)
        reason_text = f": {first[1]}" if first else ""
        raise user_error(
            f"`{folder}` has no video or picture that can be read{reason_text}",
            help=f"files of these kinds are looked at: {', '.join(sorted(SUFFIXES))}",
        )
    without = sum(not row["caption"] for row in rows)
    return FolderRows(tuple(rows), skipped, without, len({entry.row for entry in table.values()} - used))


def _files(folder: Path) -> Iterator[Path]:
    """Videos and stills of the folder and of those in it, by name; hidden ones are left out."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(place) / name


def _text_beside(path: Path) -> str:
    text = path.with_suffix(".txt")
    return text.read_text(encoding="utf-8-sig").strip() if text.is_file() else ""


@dataclass(frozen=True)
class _Caption:
    row: int
    caption: str | list[str]


def _table(path: Path, folder: Path, columns: str) -> dict[str, _Caption]:
    """The captions of a table by what names a file: its place, from the table's folder or from the videos'; of one
    without a folder also the name or stem alone. Raises ``UserError``."""
    captions: dict[str, _Caption] = {}
    for row in read_rows(path, replace(CLIP_KEYS, columns=Columns.of(columns))):
        file, given = row.values.get("path", row.values.get("id")), texts(row, "caption")
        if not isinstance(file, str):
            raise user_error(
                "this row of captions names no file",
                label="no `path`",
                help="add a column `path`, `video` or `file_name`, or name the one with --columns path=COLUMN",
                span=row.span(),
            )
        entry = _Caption(row.number, given[0] if len(given) == 1 else list(given) or "")
        keys = [str((start / file).resolve()) for start in (path.parent, folder)]
        for key in (*keys, *([file] if "/" not in file else [])):
            captions.setdefault(key, entry)
    return captions
