"""A folder for files of this process alone. What a process that was killed has left is removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

PREFIX = "arachnec-rank-"
LOCK = "lock"
NEW_S = 60.0  # younger folders may belong to a process that is about to lock them


class ScratchFolder:
    """``path`` is there until this is closed or forgotten, or the process ends. Where it was killed while a fork of it
    lives on, the folder stays as long as the fork."""

    def __init__(self) -> None:
        remove_left_behind()
        root = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(root / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: nobody else takes one there either
            fcntl.flock(lock, fcntl.LOCK_EX)
        self.path = root / "files"
        self.path.mkdir()
        self._finish = weakref.finalize(self, _remove, root, lock, os.getpid())

    def close(self) -> None:
        self._finish()


def remove_left_behind() -> None:
    """Remove the folders whose processes are gone: nobody holds their locks. Those of other users stay."""
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            state = root.stat(follow_symlinks=False)
            own = stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
            if not own or time.time() - state.st_mtime < NEW_S:
                continue
            lock = os.open(root / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # not one of these, or gone meanwhile
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
        except OSError:  # its process is there
            pass
        finally:
            os.close(lock)


def _remove(root: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork has the finalizer, too
        shutil.rmtree(root, ignore_errors=True)
        os.close(lock)
