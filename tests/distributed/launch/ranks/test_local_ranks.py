"""The launcher keeps to its machine, and leaves nothing behind."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.launch.failure import failure_of, read_failure, record_failure
from arachnec.launch.local_ranks import RanksStopped, RankStayed, RankTold, launch
from tests.house.test_house import ROOT


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="listening sockets are read from /proc")
def test_the_store_listens_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told: list[bytes] = []
    launch(1, (), told.append, worker="tests.distributed.launch.ranks.listening_worker")
    assert told == [b"0100007F"]


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_is_stopped_once_all_is_done_is_named(monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
    """No rank is left that could tell it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(UserError) as told:
        launch(2, (str(silent),), ignored, worker="tests.distributed.launch.ranks.stopped_worker", leave_s=0.5)
    (stayed,) = told.value.diagnostics
    assert isinstance(stayed, RankStayed)
    assert (stayed.rank, stayed.world) == (silent, 2)
    assert stayed.seconds >= 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is read from /proc")
@pytest.mark.parametrize(("who", "shared"), [("all", ()), ("all", ("json",)), ("parent", ("json",))])
def test_ranks_that_are_all_stopped_are_told_and_ended(
    monkeypatch: pytest.MonkeyPatch, who: str, shared: tuple[str, ...]
) -> None:
    """None of them could, nor the process that alone knows how forks end."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    worker = "tests.distributed.launch.ranks.stopped_worker"
    with pytest.raises(UserError) as told:
        launch(2, (who,), ignored, worker=worker, shared=shared, stopped_s=0.5)
    (stopped,) = told.value.diagnostics
    assert isinstance(stopped, RanksStopped)
    assert stopped.world == 2 and stopped.seconds >= 0.5


def ignored(event: bytes) -> None:
    """What a rank tells."""


def test_a_failure_is_told_through_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of(UserError(RankTold(None, "a mistake")))
    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv("ARACHNEC_ERROR_FD", str(file.fileno()))
        assert read_failure(file.fileno()) is None
        record_failure(failure)
        assert read_failure(file.fileno()) == failure
    assert sys.platform != "linux" or not isinstance(file.name, str)
