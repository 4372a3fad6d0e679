"""Which manifests a run may go on with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from arachnec.data.clip import VideoClip
from arachnec.executable.folder import Executable, read_executable
from arachnec.executable.other_manifests import Edition, continued, ordered
from arachnec.ir.diagnostic import UserError
from tests.distributed.executor_cases import Work, clip, executable

WORKS = [Work((0,), (0,), 0)]


def of_files(folder: Path, *files: str, ids: bool = False) -> Executable:
    clips: list[VideoClip] = []
    for row, file in enumerate(files):
        clips.append(replace(clip(Path(file).stem if ids else row, 3), path=Path("videos", file)))
    return read_executable(executable(folder, [clips], WORKS, 1))


def test_rows_without_an_id_are_known_by_their_number_and_file(tmp_path: Path) -> None:
    before = (Edition.of(of_files(tmp_path / "old", "a.mp4", "b.mp4")),)
    grown = continued(before, of_files(tmp_path / "new", "a.mp4", "b.mp4", "c.mp4"), 1)
    assert [sorted(edition.ids) for edition in grown] == [[0, 1], [0, 1, 2]]
    with pytest.raises(
        UserError, match=r"row 0 of the manifest was `videos/a.mp4` when the run began, and is `videos/c.mp4`"
    ):
        continued(before, of_files(tmp_path / "moved", "c.mp4", "a.mp4", "b.mp4"), 1)
    assert continued(before, of_files(tmp_path / "renamed", "a.mkv", "b.mp4"), 1) == before


def test_other_batches_of_the_same_clips_are_refused_once_a_run_has_grown(tmp_path: Path) -> None:
    before = (Edition.of(of_files(tmp_path / "old", "a.mp4", ids=True)),)
    grown = continued(before, of_files(tmp_path / "new", "a.mp4", "b.mp4", ids=True), 1)
    assert continued(grown, of_files(tmp_path / "same", "a.mp4", "b.mp4", ids=True), 2) == grown
    with pytest.raises(UserError, match="in other batches"):
        continued(grown, of_files(tmp_path / "turned", "b.mp4", "a.mp4", ids=True), 2)


def test_rows_with_an_id_may_stand_anywhere(tmp_path: Path) -> None:
    before = (Edition.of(of_files(tmp_path / "old", "a.mp4", "b.mp4", ids=True)),)
    grown = continued(before, of_files(tmp_path / "new", "c.mp4", "b.mp4", "a.mp4", ids=True), 1)
    assert [sorted(edition.ids) for edition in grown] == [["a", "b"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    "text",
    [
        '[{"begins": 0, "batches": []}]',
        '[{"begins": 0, "batches": [[]]}]',
        '[{"begins": 2, "batches": [[0]]}]',
        '[{"begins": 0, "batches": [[0], [1]]}, {"begins": 3, "batches": [[0]]}]',
        '[{"begins": 0, "batches": [[0]]}, {"begins": 0, "batches": [[0]]}]',
    ],
)
def test_editions_that_begin_where_no_epoch_ends_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"begin|without clips"):
        ordered(msgspec.json.decode(text, type=tuple[Edition, ...]))
