"""Ranks that are forks fare as others do: they begin, fail and are ended alike, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.launch.local_ranks import RankTold, launch
from tests.house.test_house import ROOT

WORKER = "tests.distributed.launch.ranks.forked_worker"
SHARED = ("xml.sax", "no.module.of.that.name")
LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")


@pytest.fixture(autouse=True)
def _found_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_forks_have_imported_what_they_share_and_are_of_one_process(tmp_path: Path) -> None:
    """A module that is not there is for the rank to tell."""
    told: list[bytes] = []
    launch(2, (str(tmp_path), "well"), told.append, worker=WORKER, shared=SHARED)
    assert told == [b"an event"]
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert first["imported"] and second["imported"]
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["process"] != second["process"]


def test_without_shared_modules_every_rank_is_a_process_of_the_launcher(tmp_path: Path) -> None:
    launch(2, (str(tmp_path), "well"), ignored, worker=WORKER)
    births = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert not any(birth["imported"] for birth in births)


@pytest.mark.parametrize("shared", [(), SHARED])
@pytest.mark.parametrize(("how", "what"), [("killed", "was killed by SIGKILL"), ("3", "ended with exit code 3")])
def test_how_a_rank_ended_is_told_alike(tmp_path: Path, how: str, what: str, shared: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"rank 1 of 2 {what}; the others were stopped"):
        launch(2, (str(tmp_path), how), ignored, worker=WORKER, shared=shared)
    assert all_gone(tmp_path)


def test_ranks_whose_server_is_killed_are_ended(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="was killed by SIGKILL; the others were stopped"):
        launch(2, (str(tmp_path), "orphans"), ignored, worker=WORKER, shared=SHARED)
    assert all_gone(tmp_path)


def test_ranks_end_where_the_launcher_was_started_with_the_end_of_children_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launch(2, (str(tmp_path), "well"), ignored, worker=WORKER, shared=SHARED)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert all_gone(tmp_path)


def test_no_rank_begins_where_the_launcher_finds_something_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_for_a_minute.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))

    def finds() -> None:
        raise UserError(RankTold(None, "a mistake"))

    started = time.monotonic()
    with pytest.raises(UserError, match="a mistake"):
        launch(2, (str(tmp_path), "well"), ignored, worker=WORKER, beside=finds, shared=("imports_for_a_minute",))
    assert time.monotonic() - started < LIMIT_S
    assert not (tmp_path / "0").exists()


def ignored(event: bytes) -> None:
    """What a rank tells."""


def all_gone(folder: Path) -> bool:
    """Whether the ranks that were there have ended, a killed one a moment later."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if not any(is_there(json.loads((folder / str(rank)).read_text())["process"]) for rank in range(2)):
            return True
        time.sleep(0.05)
    return False


def is_there(process: int) -> bool:
    """Whether it runs: what nobody has waited for yet has ended, too."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
