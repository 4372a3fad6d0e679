"""A Parquet manifest of any length as a dataset: rows are read as they are drawn, and no list of them is built.

Of one too long for a list ``compile`` has to know how many clips it has, and one clip of every shape: the columns of
sizes are read once, window by window; captions are measured, and not kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from arachnec.data.clip import VideoClip
from arachnec.data.columns import CLIP_KEYS, Columns, RowKeys
from arachnec.data.manifest import ALL, Batch, clips_of_row
from arachnec.data.rows import Row, no_manifest_error, no_py_arrow_error, normalised, parquet_row, unpacking
from arachnec.data.stratified import stratified
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Span

WINDOW = 2**16  # rows that are shuffled with each other


class ParquetClips:
    """Gives the clips of a manifest one by one and again, for ``Engine(..., batch=N)``. A row's id is its number.

    With a ``seed`` row groups come in another order in every round, and rows of a window in another one too; rows far
    apart in one row group stay apart. Where batches are to be ``stratified``, given is how many clips make one: every
    batch of a window has its share of each shape. It says where it stands, so a resumed run goes on from there.
    """

    def __init__(
        self, path: str | Path, seed: int | None = None, *, stratified: int | None = None, columns: str = ""
    ) -> None:
        """Reads the file's metadata alone. Raises ``UserError`` for no manifest, or an unknown column."""
        self.path = Path(path)
        if not self.path.is_file():
            raise no_manifest_error(str(path))
        try:
            import pyarrow.parquet
        except ImportError:
            raise no_py_arrow_error(str(path)) from None
        with unpacking(self.path):
            self._file = pyarrow.parquet.ParquetFile(self.path, memory_map=True)
            names = self._file.schema_arrow.names
        self._keys = replace(CLIP_KEYS, columns=Columns.of(columns))
        self._keys.columns.require_present(str(path), names)
        for column, name in enumerate(names):
            self._keys.require_place(name, Span(f"{path} (column {column + 1})", 1, 1, 1, 1))
        self._seed = 0 if seed is None and stratified is not None else seed
        self._stratified = stratified
        self._round = 0
        self._rows = 0  # drawn of this round
        self._copies = 0  # of the next row, drawn before
        self._begun = False

    @property
    def rows(self) -> int:
        return int(self._file.metadata.num_rows)

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._round, "rows": self._rows, "copies": self._copies, "order": self._order_name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ``UserError`` for a place in another order: some clips would come twice, and some not at all."""
        before = state.get("order", self._order_name)
        if before != self._order_name:
            raise user_error(
                f"the clips of `{self.path}` come in another order: {self._order_name}; the checkpoint's was {before}",
                help="resume with the same seed, `shuffle` and `stratified`, or begin a new run",
            )
        self._round, self._rows, self._copies = state["round"], state["rows"], state["copies"]
        self._begun = False

    def __iter__(self) -> Iterator[VideoClip]:
        if self._begun or self._rows >= self.rows:
            self._round, self._rows, self._copies = self._round + 1, 0, 0
        self._begun = True
        for row in self._from(self._rows):
            clips = list(clips_of_row(row))
            for clip in clips[self._copies :]:
                self._copies += 1
                if self._copies == len(clips):
                    self._rows, self._copies = self._rows + 1, 0
                yield clip

    def _from(self, skipped: int) -> Iterator[Row]:
        """The rows of this round behind so many."""
        sizes = [self._file.metadata.row_group(number).num_rows for number in range(self._file.num_row_groups)]
        first = [sum(sizes[:number]) for number in range(len(sizes))]
        groups = list(range(len(sizes)))
        if self._seed is not None:
            random.Random(f"{self._seed}/{self._round}").shuffle(groups)
        for group in groups:
            if skipped >= sizes[group]:
                skipped -= sizes[group]
                continue
            start = first[group]
            for batch in self._windows(group):
                for place in self._order(batch, start)[skipped:]:
                    with unpacking(self.path):
                        (values,) = batch.slice(place, 1).to_pylist()
                    yield normalised(parquet_row(self.path, start + place, values), self._keys)
                skipped = max(0, skipped - len(batch))
                start += len(batch)

    def _windows(self, group: int) -> Iterator[Any]:
        with unpacking(self.path):
            yield from self._file.iter_batches(batch_size=WINDOW, row_groups=[group])

    @property
    def _order_name(self) -> str:
        if self._seed is None:
            return "that of the file"
        return f"seed {self._seed}" + (f", stratified for {self._stratified}" if self._stratified else "")

    def _order(self, window: Any, start: int) -> list[int]:
        """Of a window's rows, of which row ``start`` of the file is the first."""
        order = list(range(len(window)))
        if self._seed is None:
            return order
        rng = random.Random(f"{self._seed}/{self._round}/{start}")
        if self._stratified is None:
            rng.shuffle(order)
            return order
        with unpacking(self.path):
            shapes = _shapes(window, self._keys)
        batches = stratified(shapes, max(1, len(window) // self._stratified), rng)
        return [place for batch in batches for place in batch]


def _shapes(window: Any, keys: RowKeys) -> list[tuple[int, ...]]:
    """What the rows of a window say of their shapes; of captions their bytes."""
    columns = key_columns(window, keys)
    numbers = [columns[key] for key in ("frames", "height", "width", "text_tokens") if key in columns]
    if "text_tokens" not in columns and "caption" in columns:
        numbers.append(caption_lengths(columns["caption"]))
    rows = zip(*(column.fill_null(-1).to_pylist() for column in numbers), strict=True)
    return [tuple(map(int, row)) for row in rows] if numbers else [()] * len(window)


def key_columns(window: Any, keys: RowKeys) -> dict[str, Any]:
    """The columns of a table by key; of several for one key the first that has a value in a row, which an empty
    text is none if another has one."""
    import pyarrow.compute

    columns = {}
    for key, names in keys.ordered(window.schema.names).items():
        given = _of_one_type([_plain(window.column(name)) for name in names])
        if len({column.type for column in given}) > 1:
            columns[key] = given[0]
        else:
            columns[key] = pyarrow.compute.coalesce(*map(_without_empty_texts, given), *given)
    return columns


def caption_lengths(captions: Any, counter: Any = None) -> Any:
    """Bytes of each caption of a column, or its tokens as a ``counter`` has them; of a list of captions those of the
    longest."""
    import pyarrow
    import pyarrow.compute

    if counter is None and pyarrow.types.is_large_string(captions.type):
        return pyarrow.compute.binary_length(captions)
    types = pyarrow.types
    if not any(
        is_one(captions.type) for is_one in (types.is_large_string, types.is_list, types.is_large_list, types.is_null)
    ):
        raise pyarrow.ArrowTypeError(f"its captions are {captions.type}, and no texts or lists of texts")
    given = ([texts] if isinstance(texts, str) else texts for texts in captions.to_pylist())
    count = counter.tokens if counter is not None else lambda texts: max(len(text.encode()) for text in texts)
    return pyarrow.array([count(texts) if texts else None for texts in given], pyarrow.int32())


def _of_one_type(columns: list[Any]) -> list[Any]:
    """Without those of nulls alone, where another is there; numbers of several types as fractions."""
    import pyarrow

    types = pyarrow.types
    given = [column for column in columns if not types.is_null(column.type)] or columns[:1]
    numbers = all(types.is_integer(column.type) or types.is_floating(column.type) for column in given)
    if not numbers or len({column.type for column in given}) == 1:
        return given
    return [column.cast(pyarrow.float64()) for column in given]


def _plain(column: Any) -> Any:
    """Texts of one type, and no gaps but nulls: integers with gaps are commonly stored as floating point, with NaN in
    these."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pyarrow.types.is_string(column.type):
        return column.cast(pyarrow.large_string())
    if not pyarrow.types.is_floating(column.type):
        return column
    return pyarrow.compute.if_else(pyarrow.compute.is_nan(column), None, column)


def _without_empty_texts(column: Any) -> Any:
    import pyarrow
    import pyarrow.compute

    if not pyarrow.types.is_large_string(column.type):
        return column
    return pyarrow.compute.if_else(pyarrow.compute.equal(column, ""), None, column)


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
    first, count = _first_shapes(file, keys, captions)
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


def _first_shapes(file: Any, keys: RowKeys, captions: CountsCaptions | None) -> tuple[dict[tuple[Any, ...], int], int]:
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
