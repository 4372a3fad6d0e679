"""A manifest too long for a list: its shapes and its count are those of the list, and what it lacks is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arachnec.data import parquet_clips
from arachnec.data.clip import VideoClip
from arachnec.data.manifest import read_manifest
from arachnec.data.parquet_clips import is_long, read_long_manifest
from arachnec.ir.diagnostic import UserError

pyarrow: Any = pytest.importorskip("pyarrow")
ROWS = 40


def written(folder: Path, **columns: list[Any]) -> Path:
    import pyarrow.parquet

    table = {
        "num_frames": [1 + 16 * (n % 3) for n in range(ROWS)],
        "height": [64] * ROWS,
        "width": [96 if n < 30 else 64 for n in range(ROWS)],
        "text": ["a" * (1 + n % 2) for n in range(ROWS)],
        **columns,
    }
    kept = {name: column for name, column in table.items() if len(column)}
    pyarrow.parquet.write_table(pyarrow.table(kept), folder / "clips.parquet", row_group_size=7)
    return folder / "clips.parquet"


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"text_tokens": [5 if n % 4 else None for n in range(ROWS)]},
        {"clips": [2 if n % 5 else None for n in range(ROWS)]},
        {"text_tokens": [5.0 if n % 4 else float("nan") for n in range(ROWS)]},
        {"text": [], "text_tokens": [float(n % 2) for n in range(ROWS)]},
        {"text": [], "cap": [["a"] * (1 + n % 2) + ["abc"] * (n % 3) for n in range(ROWS)]},
        {"caption": [None if n % 2 else "abcd" for n in range(ROWS)], "aes": [4.5] * ROWS},
        {"caption": ["" if n % 2 else "abcd" for n in range(ROWS)]},
        {"caption": pyarrow.array([None if n % 2 else "abcd" for n in range(ROWS)], pyarrow.large_string())},
        {
            "text": [],
            "cap": pyarrow.array([["a"] * (1 + n % 2) for n in range(ROWS)], pyarrow.large_list(pyarrow.string())),
        },
        {"text": pyarrow.array(["a" * (1 + n % 2) for n in range(ROWS)]).dictionary_encode()},
        {"caption": pyarrow.nulls(ROWS)},
        {"frames": pyarrow.array([9 if n % 2 else None for n in range(ROWS)], pyarrow.int32())},
    ],
)
def test_shapes_and_count_are_those_of_the_list(
    columns: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_clips, "WINDOW", 16)
    path = written(tmp_path, **columns)
    listed = read_manifest(path).clips
    long, clips = read_long_manifest(path, 8)
    assert (long.rows, long.clips, long.batch) == (ROWS, len(listed), 8)
    assert [clip.shape for clip in clips] == sorted({clip.shape for clip in listed})
    assert all(clip in listed for clip in clips)


@pytest.mark.parametrize("captions", [list(range(ROWS)), [b"abc"] * ROWS])
def test_captions_that_are_no_texts_are_told(captions: list[Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="and no texts or lists of texts"):
        read_long_manifest(written(tmp_path, text=captions), 8)


def test_only_a_long_parquet_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    assert not is_long(path)
    monkeypatch.setattr(parquet_clips, "LISTED", ROWS - 1)
    assert is_long(path)
    assert not is_long(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("x")
    assert not is_long(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("columns", "batch", "expected"),
    [
        ({}, None, "nothing says how many clips make a global batch"),
        ({"iteration": list(range(ROWS))}, 8, "it has the column `iteration`"),
        ({"height": []}, 8, "it has no column `height`"),
        ({"height": [64] * 9 + [None] * (ROWS - 9)}, 8, "row 10 has no size"),
    ],
)
def test_what_it_lacks_is_told(columns: dict[str, list[Any]], batch: int | None, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected):
        read_long_manifest(written(tmp_path, **columns), batch)


def test_another_file_than_was_compiled_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    long, clips = read_long_manifest(path, 8)
    assert [clip.id for clip in long.drawn(None, stratified=False)] == list(range(ROWS))
    with pytest.raises(UserError, match="clip `0` is 1 x 2 x 3, which no clip was"):
        long.tokens(VideoClip(0, 1, 2, 3, 4))
    written(tmp_path, **{name: [1] * 3 for name in ("num_frames", "height", "width", "text_tokens")}, text=[])
    with pytest.raises(UserError, match="it has 3 rows, and had 40"):
        long.drawn(None, stratified=False)
    assert clips


def test_captions_are_counted_as_the_model_counts_and_columns_are_those_asked_for(tmp_path: Path) -> None:
    class Words:
        def tokens(self, captions: Sequence[str]) -> int:
            return max(len(caption.split()) for caption in captions)

        def clip(self, clip: VideoClip) -> VideoClip:
            return replace(clip, text_tokens=self.tokens(clip.texts)) if clip.counted else clip

    path = written(tmp_path, text=[], words=["a cat" if n % 3 else "a cat runs" for n in range(ROWS)])
    long, clips = read_long_manifest(path, 8, "caption=words", Words())
    assert {clip.text_tokens for clip in clips} == {2, 3}
    drawn = list(long.drawn(None, stratified=False))
    assert [clip.caption for clip in drawn[:3]] == ["a cat runs", "a cat", "a cat"]
