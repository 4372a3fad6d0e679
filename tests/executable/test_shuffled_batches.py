"""Shuffled and stratified batches: every clip once an epoch, in another order each time, the same in every run."""

from __future__ import annotations

from pathlib import Path

from arachnec.executable.batches import ManifestBatches, ShuffledBatches, StratifiedBatches
from arachnec.executable.folder import read_executable
from tests.distributed.executor_cases import Work, clip, executable

BATCHES = ([clip(n, 1 + n % 3) for n in range(4)], [clip(n, 1 + n % 3) for n in range(4, 7)], [clip(7, 2)])


def test_every_epoch_has_every_clip_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    works = [Work((n,), (0,), float(n)) for n in range(4)]
    read = read_executable(executable(tmp_path, BATCHES, works, 1))
    batches = ShuffledBatches(read, seed=5)
    epochs = [[sorted(batches.draw(3 * epoch + number).clips) for number in range(3)] for epoch in range(4)]
    for epoch in epochs:
        assert [len(ids) for ids in epoch] == [4, 3, 1]
        assert sorted(id for ids in epoch for id in ids) == list(range(8))
    assert len({str(epoch) for epoch in epochs}) > 1
    again = ShuffledBatches(read, seed=5)
    assert [sorted(again.draw(step).clips) for step in range(12)] == [ids for epoch in epochs for ids in epoch]
    assert ShuffledBatches(read, seed=6).draw(0).clips != batches.draw(0).clips
    drawn = batches.draw(4)
    assert {c.id: c.frames for c in drawn.planned} == {id: c.frames for id, c in drawn.clips.items()}
    assert drawn.mark.clips == ManifestBatches(read).mark(5).clips == 8 + 4 + 3
    assert drawn.mark.data != ManifestBatches(read).mark(5).data, "a checkpoint of another order is another run's"


def test_stratified_every_batch_of_every_epoch_has_its_share_of_every_shape(tmp_path: Path) -> None:
    frames = [1, 2, 1, 2, 2, 1, 1, 2, 2, 1, 2, 1]
    works = [Work((n,), (0,), float(n)) for n in range(4)]
    clips = [clip(n, count) for n, count in enumerate(frames)]
    read = read_executable(executable(tmp_path, (clips[:4], clips[4:8], clips[8:]), works, 1))
    batches = StratifiedBatches(read, seed=5)
    epochs = [[batches.draw(3 * epoch + number) for number in range(3)] for epoch in range(4)]
    for epoch in epochs:
        assert sorted(id for drawn in epoch for id in drawn.clips) == list(range(12))
        assert [sorted(c.frames for c in drawn.planned) for drawn in epoch] == [[1, 1, 2, 2]] * 3
    assert len({str([sorted(drawn.clips) for drawn in epoch]) for epoch in epochs}) > 1
    assert batches.mark(7).clips == 12 * 2 + 4
    assert len({order.mark(3).data for order in (batches, ShuffledBatches(read, 5), ManifestBatches(read))}) == 3
