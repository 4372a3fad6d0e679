"""A Parquet manifest that is read as it is drawn: every clip once a round, and on from where a run stood."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arachnec.data.batch_source import BatchSource
from arachnec.data.manifest import read_manifest
from arachnec.data.parquet_clips import ParquetClips
from arachnec.ir.diagnostic import UserError

pyarrow: Any = pytest.importorskip("pyarrow")
ROWS = 23


def written(folder: Path, **more: list[Any]) -> Path:
    import pyarrow.parquet

    sizes = {"frames": [17.0 if n % 3 else 1.0 for n in range(ROWS)], "height": [64] * ROWS, "width": [96] * ROWS}
    table = pyarrow.table({**sizes, "caption": [f"clip {n}" for n in range(ROWS)], **more})
    pyarrow.parquet.write_table(table, folder / "clips.parquet", row_group_size=7)
    return folder / "clips.parquet"


def test_in_order_its_clips_are_those_of_the_manifest(tmp_path: Path) -> None:
    path = written(tmp_path)
    clips = ParquetClips(path)
    assert clips.rows == ROWS
    assert list(clips) == list(read_manifest(path).clips)
    assert [clip.id for clip in clips] == list(range(ROWS))  # again


def test_shuffled_every_round_has_every_clip_in_another_order(tmp_path: Path) -> None:
    clips = ParquetClips(written(tmp_path), seed=1)
    rounds = [[clip.id for clip in clips] for _ in range(3)]
    assert all(sorted(map(int, one)) == list(range(ROWS)) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3
    assert rounds == [[clip.id for clip in again] for again in [ParquetClips(tmp_path / "clips.parquet", seed=1)] * 3]


def test_stratified_every_batch_has_its_share_of_every_shape(tmp_path: Path) -> None:
    clips = list(ParquetClips(written(tmp_path), seed=1, stratified=3))
    assert sorted(int(clip.id) for clip in clips) == list(range(ROWS))
    first = [clip.frames for clip in clips[:21]]  # windows are row groups of 7: two batches each, of 3 and 4
    assert all(1 in batch and 17 in batch for start in (0, 7, 14) for batch in (first[start : start + 3],))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("drawn", [1, 3, 5, 7, 12])
def test_a_source_goes_on_where_it_stood(seed: int | None, drawn: int, tmp_path: Path) -> None:
    path = written(tmp_path, clips=[1 + n % 2 for n in range(ROWS)])  # every second row is two clips

    def source() -> BatchSource:
        return BatchSource(ParquetClips(path, seed), batch=5, repeat=True)

    whole, begun, resumed = source(), source(), source()
    ids = [[clip.id for clip in whole.draw() or ()] for _ in range(drawn + 4)]
    for _ in range(drawn):
        begun.draw()
    resumed.restore(begun.batches, begun.clips, begun.digest, begun.state())
    assert [[clip.id for clip in resumed.draw() or ()] for _ in range(4)] == ids[drawn:]


def test_a_place_in_another_order_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    state = ParquetClips(path, seed=1).state_dict()
    for other in (ParquetClips(path), ParquetClips(path, seed=2), ParquetClips(path, seed=1, stratified=4)):
        with pytest.raises(UserError, match=r"come in another order: .*; the checkpoint's was seed 1"):
            other.load_state_dict(state)


def test_what_is_no_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no manifest"):
        ParquetClips(tmp_path / "gone.parquet")
    (tmp_path / "x.parquet").write_text("x")
    with pytest.raises(UserError, match="cannot be read"):
        ParquetClips(tmp_path / "x.parquet")
    with pytest.raises(UserError, match="unknown key `framez`"):
        ParquetClips(written(tmp_path, framez=[1] * ROWS))
