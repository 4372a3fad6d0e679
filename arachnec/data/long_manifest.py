"""A Parquet manifest too long for a list: what `compile` has to know of it. Rows are read as they are drawn.

In: the file. Out: how many clips it has, and one clip of every shape. The columns of sizes are read once, window by
window; captions are measured, and not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from arachnec.data.clip import VideoClip
from arachnec.data.columns import CLIP_KEYS, Columns, RowKeys
from arachnec.data.manifest import ALL, Batch, clips_of_row
from arachnec.data.parquet_clips import WINDOW, ParquetClips, caption_lengths, key_columns
from arachnec.data.rows import normalised, parquet_row, unpacking
from arachnec.ir.diagnostic import UserError, user_error

LISTED = 100_000  # rows up to which a manifest is read as a list
SIZES = ("frames", "height", "width")


def long_manifest_lacks_error(path: str, rows: int, reason: str, remedy: str) -> UserError:
    return user_error(f"`{path}` has {rows} rows, too many to list, and {reason}", help=remedy)


def other_manifest_error(path: str, reason: str) -> UserError:
    return user_error(
        f"`{path}` is not the manifest that was compiled: {reason}", help="compile again, or put the file back"
    )


class CountsCaptions(Protocol):
    """Counts text tokens as a model's tokenizer does."""

    def tokens(self, captions: Sequence[str]) -> int: ...

    def clip(self, clip: VideoClip) -> VideoClip: ...


class LongManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a manifest: its file, rows, clips, clips in a global batch, and the tokens of every shape."""

    path: str
    rows: int
    clips: int
    batch: int
    columns: str = ""
    shapes: tuple[tuple[int, int, int, int, int], ...] = ()  # frames, height, width, text tokens; transformer tokens

    def drawn(self, seed: int | None, *, stratified: bool) -> ParquetClips:
        """Its clips, in the file's order without a ``seed``. Raises ``UserError`` for a file that is another now."""
        clips = ParquetClips(self.path, seed, stratified=self.batch if stratified else None, columns=self.columns)
        if clips.rows != self.rows:
            raise other_manifest_error(self.path, f"it has {clips.rows} rows, and had {self.rows}")
        return clips

    def tokens(self, clip: VideoClip) -> int:
        """Transformer tokens of a clip. Raises ``UserError`` for a shape that the file did not have."""
        known = {shape[:4]: shape[4] for shape in self.shapes}
        if clip.shape not in known:
            sizes = " x ".join(map(str, clip.shape[:3]))
            raise other_manifest_error(self.path, f"clip `{clip.id}` is {sizes}, which no clip was")
        return known[clip.shape]


def is_long(path: Path) -> bool:
    """Whether a manifest is not to be read as a list. One that cannot be read is not: `read_manifest` says why."""
    if path.suffix.lower() != ".parquet" or not path.is_file():
        return False
    try:
        import pyarrow
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows) > LISTED
    except (ImportError, OSError, pyarrow.ArrowException):
        return False


def read_long_manifest(
    path: Path, batch: Batch, columns: str = "", captions: CountsCaptions | None = None
) -> tuple[LongManifest, list[VideoClip]]:
    """The manifest without tokens, and a clip of every shape, the shortest first. Raises ``UserError``."""
    rows = ParquetClips(path, columns=columns).rows  # which holds the columns' names to what is known
    with unpacking(path):
        return _read(path, rows, batch, columns, captions)


def _read(
    path: Path, rows: int, batch: Batch, columns: str, captions: CountsCaptions | None
) -> tuple[LongManifest, list[VideoClip]]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    keys = replace(CLIP_KEYS, columns=Columns.of(columns))
    _demand_listable(path, rows, keys.ordered(file.schema_arrow.names), batch)
    assert isinstance(batch, int)
    first, count = _shapes(file, keys, captions)
    for shape, place in first.items():
        if None in shape[: len(SIZES)]:
            remedy = "give it in every row: so many videos are not opened to look"
            raise long_manifest_lacks_error(str(path), rows, f"row {place + 1} has no size", remedy)
    of_shapes = _clips_at(path, file, keys, sorted(first.values()))
    clips = sorted(map(captions.clip, of_shapes) if captions else of_shapes, key=lambda clip: clip.shape)
    shortest_first = {clip.shape: clip for clip in reversed(clips)}
    return LongManifest(str(path.absolute()), rows, count, batch, columns), list(reversed(shortest_first.values()))


def _demand_listable(path: Path, rows: int, names: Mapping[str, list[str]], batch: Batch) -> None:
    reason, remedy = "", "order the rows as they are to be trained, and give --batch"
    if "iteration" in names:
        reason = "it has the column `iteration`"
    elif batch is None or batch == ALL:
        reason = (
            "nothing says how many clips make a global batch" if batch is None else "they would make one global batch"
        )
    elif missing := [key for key in SIZES if key not in names]:
        reason, remedy = f"it has no column `{missing[0]}`", "add it: so many videos are not opened to look"
    if reason:
        raise long_manifest_lacks_error(str(path), rows, reason, remedy)


def _shapes(file: Any, keys: RowKeys, captions: CountsCaptions | None) -> tuple[dict[tuple[Any, ...], int], int]:
    """Of every shape the first row that has it, and the clips of all rows."""
    import numpy
    import pyarrow
    import pyarrow.compute

    names = keys.ordered(file.schema_arrow.names)
    columns = [name for key in (*SIZES, "text_tokens", "caption", "clips") for name in names.get(key, ())]
    first: dict[tuple[Any, ...], int] = {}
    start = clips = 0
    for window in file.iter_batches(batch_size=WINDOW, columns=columns):
        given = key_columns(window, keys)
        texts = [given["text_tokens"]] if "text_tokens" in given else []
        texts += [caption_lengths(given["caption"], captions)] if "caption" in given else []
        table = {key: given[key] for key in SIZES} | ({"text": pyarrow.compute.coalesce(*texts)} if texts else {})
        table["place"] = pyarrow.array(numpy.arange(start, start + len(window)))
        sizes = [key for key in table if key != "place"]
        grouped = pyarrow.table(table).group_by(sizes).aggregate([("place", "min")]).to_pydict()
        for *shape, place in zip(*(grouped[key] for key in (*sizes, "place_min")), strict=True):
            first.setdefault(tuple(shape), place)
        copies = given["clips"].fill_null(1) if "clips" in given else None
        clips += len(window) if copies is None else int(pyarrow.compute.sum(copies).as_py())
        start += len(window)
    return first, clips


def _clips_at(path: Path, file: Any, keys: RowKeys, places: Sequence[int]) -> Iterator[VideoClip]:
    """The clips of some rows, in ascending order; row groups without one are not read."""
    start = 0
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        if any(start <= place < end for place in places):
            for window in file.iter_batches(batch_size=WINDOW, row_groups=[group]):
                for place in places:
                    if start <= place < start + len(window):
                        (values,) = window.slice(place - start, 1).to_pylist()
                        yield next(clips_of_row(normalised(parquet_row(path, place, values), keys)))
                start += len(window)
        start = end
