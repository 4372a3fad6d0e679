"""A run may go on with more clips: the epoch that has begun ends as it began, and the next one has all."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.data.clip import VideoClip
from tests.distributed.executor.runs.test_audit_log import epochs
from tests.distributed.executor_cases import Work, clip, executable, train_on
from tests.distributed.harness import RankError
from tests.slow import quick

OLD = [[clip("a", 3), clip("b", 5)], [clip("c", 2), clip("d", 2), clip("e", 3)]]
NEW = [[clip("f", 9), clip("a", 3)], [clip("e", 3), clip("b", 5)], [clip("d", 2), clip("g", 2), clip("c", 2)]]
WORKS = [Work((0,), (0,), 0), Work((1,), (1,), 0)]


def trained(kept: Path) -> list[set[str | int]]:
    """The clips of every epoch, each of them once."""
    lists = [[clip for line in lines for clip in line.trained] for lines in epochs(kept)]
    assert all(len(set(ids)) == len(ids) for ids in lists)
    return [set(ids) for ids in lists]


def ids(batches: list[list[VideoClip]]) -> set[str | int]:
    return {clip.id for batch in batches for clip in batch}


ORDERS = {"in-order": (), "shuffled": ("shuffle=true",), "strata": ("stratified=true",)}


@pytest.mark.parametrize("order", quick(ORDERS, "shuffled"))
def test_every_epoch_has_its_clips_once_and_the_next_one_those_that_are_new(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    options = {"checkpoint": kept, "every": 1, "settings": order}
    old = executable(tmp_path / "old", OLD, WORKS, 2)
    train_on(2, old, steps=3, **options)  # an epoch and a half
    new = executable(tmp_path / "new", NEW, WORKS, 2)
    train_on(2, new, steps=5, resume=True, **options)
    train_on(1, new, epochs=4, resume=True, **options)
    assert trained(kept) == [ids(OLD), ids(OLD), ids(NEW), ids(NEW)]
    lengths = [len(lines) for lines in epochs(kept)]
    assert lengths == [2, 2, 3, 3]
    if not order:
        assert [line.trained for line in epochs(kept)[1]] == [[clip.id for clip in batch] for batch in OLD]


def test_a_run_does_not_go_on_with_fewer_clips_or_others_of_their_names(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    train_on(1, executable(tmp_path / "old", OLD, WORKS, 2), steps=1, checkpoint=kept)
    fewer = executable(tmp_path / "fewer", [NEW[0], NEW[1]], WORKS, 2)
    with pytest.raises(RankError, match="the manifest lacks 2 clips that the run to resume trains: `c`, `d`"):
        train_on(1, fewer, steps=4, checkpoint=kept, resume=True)
    changed = [[clip("f", 9), clip("a", 4)], *NEW[1:]]
    with pytest.raises(RankError, match="it was made with other clips, or in other batches"):
        train_on(1, executable(tmp_path / "changed", changed, WORKS, 2), steps=4, checkpoint=kept, resume=True)
