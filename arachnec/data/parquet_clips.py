"""A Parquet manifest of any length as a dataset: rows are read as they are drawn, and no list of them is built."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from arachnec.data.clip import VideoClip
from arachnec.data.manifest import clips_of_row
from arachnec.data.rows import (
    ALIASES,
    CLIP_KEYS,
    NoManifest,
    NoPyArrow,
    Row,
    canonical_key,
    parquet_row,
    unpacking,
)
from arachnec.data.stratified import stratified
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Span

WINDOW = 2**16  # rows that are shuffled with each other


@dataclass(frozen=True)
class OtherOrder(Diagnostic):
    title: ClassVar[str] = "the clips of `{path}` come in another order: {now}; the checkpoint's was {before}"
    help: ClassVar[str] = "resume with the same seed, `shuffle` and `stratified`, or begin a new run"
    path: str
    now: str
    before: str


class ParquetClips:
    """Gives the clips of a manifest one by one and again, for ``Engine(..., batch=N)``. A row's id is its number.

    With a ``seed`` row groups come in another order in every round, and rows of a window in another one too; rows far
    apart in one row group stay apart. Where batches are to be ``stratified``, given is how many clips make one: every
    batch of a window has its share of each shape. It says where it stands, so a resumed run goes on from there.
    """

    def __init__(self, path: str | Path, seed: int | None = None, *, stratified: int | None = None) -> None:
        """Reads the file's metadata alone. Raises ``UserError`` for no manifest, or an unknown column."""
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(NoManifest(None, str(path)))
        try:
            import pyarrow.parquet
        except ImportError:
            raise UserError(NoPyArrow(None, str(path))) from None
        with unpacking(self.path):
            self._file = pyarrow.parquet.ParquetFile(self.path, memory_map=True)
            names = self._file.schema_arrow.names
        for column, name in enumerate(names):
            canonical_key(name, Span(f"{path} (column {column + 1})", 1, 1, 1, 1), CLIP_KEYS)
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
            raise UserError(OtherOrder(None, str(self.path), self._order_name, str(before)))
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
                    yield parquet_row(self.path, start + place, values)
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
        batches = stratified(_shapes(window), max(1, len(window) // self._stratified), rng)
        return [place for batch in batches for place in batch]


def _shapes(window: Any) -> list[tuple[int, ...]]:
    """What the rows of a window say of their shapes; of captions their bytes."""
    import pyarrow.compute

    columns = {
        ALIASES.get(name, name): column for name, column in zip(window.schema.names, window.columns, strict=True)
    }
    numbers = [columns[key] for key in ("frames", "height", "width", "text_tokens") if key in columns]
    if "text_tokens" not in columns and "caption" in columns:
        numbers.append(pyarrow.compute.binary_length(columns["caption"]))
    rows = zip(*(column.fill_null(-1).to_pylist() for column in numbers), strict=True)
    return [tuple(map(int, row)) for row in rows] if numbers else [()] * len(window)
