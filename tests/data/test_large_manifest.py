"""Large manifests: read line by line, and refused in one message where a list of them would be too long."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from arachnec.data import rows
from arachnec.data.manifest import read_manifest
from arachnec.data.parquet_clips import read_long_manifest
from arachnec.data.requests import read_requests
from arachnec.ir.diagnostic import UserError, render_all

ROW = {"frames": 9, "height": 32, "width": 48, "text_tokens": 8}
HEAD, LINE = "frames,height,width,text_tokens\n", "9,32,48,8\n"


def message(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        read_manifest(path)
    return render_all(raised.value.diagnostics)


def jsonl(folder: Path, count: int) -> Path:
    path = folder / "clips.jsonl"
    path.write_text("\n\n".join([json.dumps(ROW)] * count))
    return path


def csv(folder: Path, count: int) -> Path:
    path = folder / "clips.csv"
    path.write_text(HEAD + f"\n{LINE}" * count)
    return path


def parquet(folder: Path, count: int) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = folder / "clips.parquet"
    pyarrow.parquet.write_table(pyarrow.table({key: [value] * count for key, value in ROW.items()}), path)
    return path


@pytest.mark.parametrize("write", [jsonl, csv, parquet])
def test_as_many_rows_are_listed_and_not_one_more(
    write: Callable[[Path, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MOST_ROWS", 5)
    assert len(read_manifest(write(tmp_path, 5)).clips) == 5
    said = message(write(tmp_path, 6))
    assert "is too large to list: it has more than 5 rows" in said
    assert "write clips as .parquet" in said


@pytest.mark.parametrize("write", [jsonl, csv])
def test_a_file_is_refused_by_its_size_before_it_is_read(
    write: Callable[[Path, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 2)
    monkeypatch.setattr(rows, "LARGEST_MANIFEST", path.stat().st_size)
    assert len(read_manifest(path).clips) == 2
    path.write_bytes(path.read_bytes() + b"\xff")
    assert "is too large to list" in message(path)


def test_a_short_parquet_file_that_unpacks_to_a_long_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(tmp_path, 2)
    monkeypatch.setattr(rows, "LARGEST_MANIFEST", 10)
    assert "MiB when it is unpacked" in message(path)


@pytest.mark.parametrize("text", ["frames", "a fox", "text"])
def test_texts_of_a_parquet_file_that_are_no_text_are_told(text: str, tmp_path: Path) -> None:
    """In names of columns and in values, of a list and of a file too long for one."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "clips.parquet"
    table = {**{key: [value] for key, value in ROW.items()}, "text": ["a fox"]}
    pyarrow.parquet.write_table(pyarrow.table(table), path, store_schema=False, compression="none")
    path.write_bytes(path.read_bytes().replace(text.encode(), b"\xb1" * len(text)))
    assert "cannot be read: " in message(path)
    with pytest.raises(UserError, match="cannot be read: "):
        long, _ = read_long_manifest(path, 1)
        list(long.drawn(None, stratified=False))


def test_blank_lines_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MOST_LINES", 30)
    path = tmp_path / "clips.jsonl"
    for blank in ("\n", " \n"):
        path.write_text(json.dumps(ROW) + "\n" + blank * 29)
        assert len(read_manifest(path).clips) == 1
        path.write_text(json.dumps(ROW) + "\n" + blank * 30)
        assert "it has more than 30 lines" in message(path)


@pytest.mark.parametrize("text", ['{"caption": "' + "a" * 200, HEAD + '"' + "a\n" * 100, HEAD + '"9","a\na"' * 40])
def test_a_row_that_does_not_end_is_refused_where_it_is_too_long(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LONGEST_ROW", 120)
    path = tmp_path / ("clips.csv" if text.startswith(HEAD) else "clips.jsonl")
    path.write_text(text)
    assert "it has more than 120 characters" in message(path)


def test_a_byte_that_is_no_text_is_told_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "clips.jsonl"
    text = (json.dumps(ROW | {"caption": "ä" * 3000}, ensure_ascii=False) + "\n").encode() * 300  # over a mebibyte
    path.write_bytes(text[:-3] + b"\xff" + text)
    assert f"not UTF-8 at byte {len(text) - 3}" in message(path)
    path.write_bytes(text[: text.rindex("ä".encode()) + 1])
    assert f"not UTF-8 at byte {text.rindex('ä'.encode())}" in message(path)


def test_what_is_read_is_not_kept(tmp_path: Path) -> None:
    """Of a long file there are its clips in memory, not its text."""
    path = tmp_path / "requests.jsonl"
    row = json.dumps(ROW | {"id": "a", "caption": "a"}) + " " * 100_000 + "\n"
    path.write_text("".join(row.replace('"id": "a"', f'"id": "{n}"') for n in range(200)))
    tracemalloc.start()
    try:
        assert len(read_requests(path)) == 200
        assert len(read_manifest(path).clips) == 200
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
