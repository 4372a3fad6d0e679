"""Nothing is left of a process's own folder: it goes with its end, or with the next process where it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from arachnec.launch.own_script import NEW_S, ScratchFolder

HOLDS = """
import sys
from arachnec.launch.own_script import ScratchFolder
folder = ScratchFolder()
(folder.path / "mine").write_text("")
print(folder.path.parent, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert (folder / "files" / "mine").is_file()
    return process, folder


def aged(folder: Path) -> None:
    before = time.time() - 2 * NEW_S
    os.utime(folder, (before, before))


def test_the_folder_of_a_killed_process_goes_with_the_next_one(folders: Path) -> None:
    process, folder = started()
    aged(folder)
    ScratchFolder().close()
    assert folder.is_dir()  # its process is there
    process.kill()
    process.communicate()
    assert folder.is_dir()
    ScratchFolder().close()
    assert list(folders.iterdir()) == []


def test_the_folder_of_a_process_that_ends_goes_with_it(folders: Path) -> None:
    process, folder = started()
    process.communicate()
    assert process.returncode == 0
    assert not folder.exists()


def test_what_is_new_or_has_no_lock_of_ours_stays(folders: Path) -> None:
    new, foreign = folders / "arachnec-rank-new", folders / "arachnec-rank-foreign"
    new.mkdir()
    (new / "lock").touch()
    foreign.mkdir()
    aged(foreign)
    ScratchFolder().close()
    assert sorted(folders.iterdir()) == [foreign, new]


def test_a_link_is_not_followed(folders: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    aged(elsewhere)
    link = folders / "arachnec-rank-link"
    link.symlink_to(elsewhere)
    before = time.time() - 2 * NEW_S
    os.utime(link, (before, before), follow_symlinks=False)
    ScratchFolder().close()
    assert (elsewhere / "lock").is_file() and link.is_symlink()


FORKS = """
import os
from arachnec.launch.own_script import ScratchFolder
folder = ScratchFolder()
if os.fork() == 0:
    folder.close()
    os._exit(0)
os.wait()
print(folder.path.is_dir())
"""


def test_a_fork_does_not_take_the_folder_of_its_parent(folders: Path) -> None:
    told = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True).stdout
    assert told == "True\n"
    assert list(folders.iterdir()) == []
