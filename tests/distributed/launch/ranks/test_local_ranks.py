"""The launcher keeps to its machine, and leaves nothing behind."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.launch.failure import failure_of, read_failure, record_failure
from arachnec.launch.local_ranks import RankTold, launch
from tests.house.test_house import ROOT


@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="listening sockets are read from /proc")
def test_the_store_listens_on_this_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    told: list[bytes] = []
    launch(1, (), told.append, worker="tests.distributed.launch.ranks.listening_worker")
    assert told == [b"0100007F"]


def test_a_failure_is_told_through_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = failure_of(UserError(RankTold(None, "a mistake")))
    with tempfile.TemporaryFile() as file:
        monkeypatch.setenv("ARACHNEC_ERROR_FD", str(file.fileno()))
        assert read_failure(file.fileno()) is None
        record_failure(failure)
        assert read_failure(file.fileno()) == failure
    assert sys.platform != "linux" or not isinstance(file.name, str)
