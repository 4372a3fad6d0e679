"""Checkpoints as files: shards of any cut are read into any other, and what is not whole is not there."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
import warnings
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_with_pickle

from arachnec.checkpoint.convert import convert_newest
from arachnec.checkpoint.files import FileRecord, fill, write_file
from arachnec.checkpoint.folder import (
    COMMIT,
    Commit,
    Position,
    committed,
    file_of,
    is_intact,
    prune,
    read_commit,
    step_folder,
    write_commit,
)
from arachnec.checkpoint.parts import Part, State, part_of, written_by
from arachnec.ir.diagnostic import UserError

POSITION = Position(7, 3, "model", 28, "data")


def whole() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(size, generator=generator) for name, size in (("a", 11), ("b", 1), ("c", 64))}


def cut(values: dict[str, Tensor], borders: list[float]) -> list[dict[str, Part]]:
    """The tensors cut at these shares of their lengths, a rank each."""
    shares = [0.0, *sorted(borders), 1.0]
    return [
        {
            name: Part(value[int(low * len(value)) : int(high * len(value))].clone(), int(low * len(value)), len(value))
            for name, value in values.items()
        }
        for low, high in itertools.pairwise(shares)
    ]


def written(folder: Path, states: list[dict[str, Part]]) -> list[FileRecord]:
    folder.mkdir(parents=True, exist_ok=True)
    return [write_file(folder / file_of(rank), state) for rank, state in enumerate(states)]


BORDERS = st.lists(st.floats(0, 1), max_size=4)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=BORDERS, after=BORDERS)
def test_what_any_ranks_wrote_any_other_ranks_read(before: list[float], after: list[float], tmp_path: Path) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    names = [record.name for record in written(tmp_path, cut(whole(), before))]
    for expected in cut(whole(), after):
        wanted = {name: Part(torch.zeros_like(p.values), p.first, p.size) for name, p in expected.items()}
        fill(tmp_path, names, wanted)
        for name, part in wanted.items():
            torch.testing.assert_close(part.values, expected[name].values, rtol=0, atol=0)


def test_what_all_ranks_hold_is_written_once_and_shared_out() -> None:
    state: State = {**whole(), "mine": Part(torch.ones(2), 4, 8), "theirs": Part(torch.ones(2), 0, 2, writes=False)}
    shares = [written_by(state, rank, 3) for rank in range(3)]
    assert sorted(name for share in shares for name in share if name != "mine") == ["a", "b", "c"]
    assert all("mine" in share and "theirs" not in share for share in shares)


def test_a_tensor_that_is_not_there_or_of_another_size_is_named(tmp_path: Path) -> None:
    names = [record.name for record in written(tmp_path, cut(whole(), [0.5]))]
    with pytest.raises(UserError, match="it has no d"):
        fill(tmp_path, names, {"d": part_of(torch.zeros(3))})
    with pytest.raises(UserError, match="its a has 11 elements, not 12"):
        fill(tmp_path, names, {"a": part_of(torch.zeros(12))})
    with pytest.raises(UserError, match="it has no c"):
        fill(tmp_path, names[:1], {"c": part_of(torch.zeros(64))})


def test_a_checkpoint_is_whole_with_its_commit_and_intact_with_its_bytes(tmp_path: Path) -> None:
    path = step_folder(tmp_path, 7)
    records = written(path, cut(whole(), [0.3]))
    assert committed(tmp_path) == []
    write_commit(path, POSITION, records)
    assert committed(tmp_path) == [path]
    assert (commit := read_commit(path)) is not None
    assert (commit.format, commit.position, commit.files) == (2, POSITION, tuple(records))
    assert all(is_intact(path, record) for record in records)
    file = path / records[1].name
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert [is_intact(path, record) for record in records] == [True, False]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[" * 5000,
        msgspec.json.encode(Commit(2, POSITION, ())),
        msgspec.json.encode(Commit(2, msgspec.structs.replace(POSITION, steps=-5), (FileRecord("a", 1, ""),))),
        msgspec.json.encode(Commit(2, msgspec.structs.replace(POSITION, steps=8), (FileRecord("a", 1, ""),))),
        msgspec.json.encode(Commit(2, POSITION, (FileRecord("../a", 1, ""),))),
        msgspec.json.encode(Commit(3, POSITION, (FileRecord("a", 1, ""),))),
    ],
)
def test_a_commit_that_cannot_be_is_none(text: bytes, tmp_path: Path) -> None:
    path = step_folder(tmp_path, 7)
    path.mkdir()
    (path / COMMIT).write_bytes(text)
    assert committed(tmp_path) == []


def test_a_commit_in_which_a_bit_has_flipped_is_none(tmp_path: Path) -> None:
    """It would be whole otherwise, and of another run: that it was damaged must not end the run for good."""
    path = step_folder(tmp_path, 7)
    write_commit(path, POSITION, written(path, cut(whole(), [])))
    sound = (path / COMMIT).read_bytes()
    assert committed(tmp_path) == [path]
    for at in range(len(sound)):
        for bit in (1, 4):
            (path / COMMIT).write_bytes(sound[:at] + bytes([sound[at] ^ bit]) + sound[at + 1 :])
            assert committed(tmp_path) == [], (at, bit)
    assert read_commit(path) is None
    undated = msgspec.structs.replace(msgspec.json.decode(sound, type=Commit), digest="")
    (path / COMMIT).write_bytes(msgspec.json.encode(undated))
    assert committed(tmp_path) == [path], "those of before have no digest"


def test_the_newest_stay_and_nothing_is_read_back_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank that died left half-written goes; what is newer may still become whole."""
    monkeypatch.delattr("arachnec.checkpoint.folder.sha256")  # a save hashes what it wrote, not what is there
    for steps in (1, 2, 3, 10):
        path = step_folder(tmp_path, steps)
        write_commit(path, msgspec.structs.replace(POSITION, steps=steps), written(path, cut(whole(), [])))
    for steps in (5, 11):
        written(step_folder(tmp_path, steps), cut(whole(), []))
    prune(tmp_path, 2, 10)
    assert not step_folder(tmp_path, 5).exists()
    assert step_folder(tmp_path, 11).exists()
    assert committed(tmp_path) == [step_folder(tmp_path, 10), step_folder(tmp_path, 3)]
    assert not step_folder(tmp_path, 1).exists()


def test_damaged_checkpoints_that_were_passed_over_do_not_push_out_new_ones(tmp_path: Path) -> None:
    """A run that resumed from before two damaged ones, or from nothing, keeps what it writes."""
    for steps in (80, 90, 10, 20, 30):
        path = step_folder(tmp_path, steps)
        write_commit(path, msgspec.structs.replace(POSITION, steps=steps), written(path, cut(whole(), [])))
    for steps in (10, 20, 30):
        prune(tmp_path, 2, steps)
    assert committed(tmp_path) == [step_folder(tmp_path, steps) for steps in (90, 80, 30, 20)]


def test_of_a_checkpoint_that_lies_elsewhere_the_link_goes(tmp_path: Path) -> None:
    for steps in (1, 2):
        path = step_folder(tmp_path, steps)
        write_commit(path, msgspec.structs.replace(POSITION, steps=steps), written(path, cut(whole(), [])))
    moved = step_folder(tmp_path, 1).rename(tmp_path / "archive")
    step_folder(tmp_path, 1).symlink_to(moved)
    prune(tmp_path, 1, 2)
    assert not step_folder(tmp_path, 1).is_symlink()
    assert (moved / COMMIT).is_file()


def earlier(folder: Path) -> Path:
    """A checkpoint as an earlier version wrote it."""
    path = step_folder(folder, 7)
    state = {"master/w": torch.arange(6.0).view(2, 3), "step/w": torch.tensor(7.0)}
    with warnings.catch_warnings(action="ignore"):  # it is for several ranks, and says so
        save_with_pickle(state, checkpoint_id=path)
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}
    commit = {"position": {"steps": 7, "seed": 3, "model": "model"}, "sha256": digests}
    (path / COMMIT).write_bytes(msgspec.json.encode(commit))
    return path


def test_a_checkpoint_of_an_earlier_version_is_converted(tmp_path: Path) -> None:
    path = earlier(tmp_path)
    assert committed(tmp_path) == []
    assert convert_newest(tmp_path, "data") == path
    commit = read_commit(path)
    assert commit is not None
    assert commit.position == msgspec.structs.replace(POSITION, clips=0)
    wanted = {"master/w": part_of(torch.zeros(6)), "step/w": part_of(torch.zeros(1))}
    fill(path, [record.name for record in commit.files], wanted)
    torch.testing.assert_close(wanted["master/w"].values, torch.arange(6.0))
    assert float(wanted["step/w"].values) == 7.0
    assert (tmp_path / "earlier-step-00000007" / ".metadata").is_file()


def undigested(path: Path) -> None:
    """Take the digests out of an earlier version's checkpoint, so that its pickle is what is read."""
    commit = msgspec.json.decode((path / COMMIT).read_bytes())
    (path / COMMIT).write_bytes(msgspec.json.encode({**commit, "sha256": {}}))


def test_a_bit_that_fell_in_an_earlier_checkpoints_tensors_is_no_weight(tmp_path: Path) -> None:
    path = earlier(tmp_path)
    (file,) = path.glob("*.distcp")
    values = torch.arange(6.0).numpy().tobytes()
    file.write_bytes(file.read_bytes().replace(values, values[:-1] + b"\x3f"))
    with pytest.raises(UserError, match=r"its file __0_0\.distcp is damaged or gone"):
        convert_newest(tmp_path, "data")
    assert committed(tmp_path) == []
    assert file.is_file()


@pytest.mark.parametrize("damaged", [b"(\x80\x02.", b"\x80\x04\x95" + b"\xff" * 8, b"00.", b""])
def test_a_damaged_pickle_is_one_message(tmp_path: Path, damaged: bytes) -> None:
    path = earlier(tmp_path)
    undigested(path)
    (path / ".metadata").write_bytes(damaged)
    with pytest.raises(UserError, match="cannot be converted: it is damaged"):
        convert_newest(tmp_path, "data")
    assert path.is_dir()


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, ("harmed",)


def test_the_pickle_of_an_earlier_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = earlier(tmp_path)
    undigested(path)
    (path / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError, match="which no checkpoint needs"):
        convert_newest(tmp_path, "data")
    assert not Path("harmed").exists()
    assert path.is_dir()
