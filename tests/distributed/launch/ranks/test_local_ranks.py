"""The launcher keeps to its machine, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.launch.ending import failure_of, read_failure, record_failure
from arachnec.launch.local_ranks import launch
from tests.house.test_house import ROOT

ENDING = "tests.distributed.launch.ranks.ending_worker"


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
    with pytest.raises(UserError, match=f"rank {silent} of 2 has done its work and does not end"):
        launch(2, (str(silent),), ignored, worker="tests.distributed.launch.ranks.stopped_worker", leave_s=0.5)


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is read from /proc")
def test_ranks_that_are_all_stopped_are_told_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them could."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    worker = "tests.distributed.launch.ranks.stopped_worker"
    with pytest.raises(UserError, match="all 2 ranks were stopped for"):
        launch(2, ("all",), ignored, worker=worker, stopped_s=0.5)


@pytest.mark.parametrize(("how", "what"), [("killed", "was killed by SIGKILL"), ("3", "ended with exit code 3")])
def test_how_a_rank_ended_is_told_and_the_others_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(UserError, match=f"rank 1 of 2 {what}; the others were stopped"):
        launch(2, (str(tmp_path), how), ignored, worker=ENDING)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_how_a_rank_ended_is_told_where_the_end_of_children_was_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(UserError, match="rank 1 of 2 ended with exit code 3"):
            launch(2, (str(tmp_path), "3"), ignored, worker=ENDING)
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def ignored(event: bytes) -> None:
    """What a rank tells."""


def test_a_failure_is_told_through_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of(user_error("a mistake"))
    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv("ARACHNEC_ERROR_FD", str(file.fileno()))
        assert read_failure(file.fileno()) is None
        record_failure(failure)
        assert read_failure(file.fileno()) == failure
    assert sys.platform != "linux" or not isinstance(file.name, str)
