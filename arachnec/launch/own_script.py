"""A rank that is somebody's own script: under torchrun, alone, or in a process group that the script has made.

It has a folder for files of its process alone. What a process that was killed has left is removed by the next one.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from arachnec.cluster.device_selection import TorchDevices, select_device, use_device
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cluster
from arachnec.launch.ending import Ended, StopRequest, end_process, failure_of
from arachnec.launch.phases import Progress
from arachnec.launch.ranks import joined_rank
from arachnec.launch.watchdog import Watchdog

if TYPE_CHECKING:
    import torch

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
PREFIX = "arachnec-rank-"
LOCK = "lock"
NEW_S = 60.0  # younger folders may belong to a process that is about to lock them
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@contextmanager
def before_joining() -> Iterator[None]:
    """A mistake in here, which the script lets out, is one message and exit code 2: the ranks do not know of each other
    yet, and all of them make it."""
    try:
        yield
    except UserError:
        usual = sys.excepthook

        def ends(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if isinstance(error, UserError):
                end_process(failure_of(error), tells=os.environ.get("RANK", "0") == "0")
            usual(kind, error, trace)

        sys.excepthook = ends
        raise


@dataclass
class OwnScript:
    """What ends with the script: the process group and its watchdog, where they are ours."""

    device: torch.device
    notes: tuple[str, ...] = ()
    watchdog: Watchdog | None = None
    restarted: bool = False  # by a launcher, after a failure
    _steps: int = 0  # that the loop has taken
    _joined: ExitStack = field(default_factory=ExitStack)
    _folder: ScratchFolder | None = None
    _usual: Hook | None = None  # what the interpreter calls for an exception without us

    @classmethod
    def join(cls, cluster: Cluster, start_s: float | None = None) -> OwnScript:
        """This process as a rank. An exception that the script lets out ends all ranks from here on, a mistake with one
        message and exit code 2."""
        import torch.distributed as dist

        cpu = cluster.attrs.get("device") == "cpu"
        if dist.is_initialized():
            backend = str(dist.get_backend_config())
            if "gloo" not in backend:
                raise user_error(
                    f"the default process group has the backend {backend}, and none for tensors of the host",
                    help=(
                        'make it with init_process_group("cpu:gloo,cuda:nccl"), or leave it to Engine: it makes one '
                        "under torchrun"
                    ),
                )
            script = cls(use_device(select_device(cpu, os.environ, TorchDevices())))
        else:
            if "RANK" not in os.environ:
                os.environ.update({**ALONE, "MASTER_PORT": os.environ.get("MASTER_PORT", "0")})
            stack = ExitStack()
            joined = stack.enter_context(joined_rank(start_s))
            device, notes = joined.meet(cpu=cpu, planned=cluster)
            script = cls(device, notes, joined.watchdog, joined.restarted, _joined=stack)
        script._watch_exceptions()
        return script

    def enter(self, phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None) -> None:
        if self.watchdog is not None:
            self.watchdog.enter(phase, limit, option, progress)

    def stops_after_step(self) -> StopRequest | None:
        """From now on a signal that asks to end is noted in it; None where the script made the process group itself."""
        return None if self.watchdog is None else self.watchdog.stops_after_step()

    def stops_at_once(self, *, acted: bool) -> None:
        """From now on such a signal ends the script at once; one that was noted and not ``acted`` upon does so now."""
        if self.watchdog is not None:
            self.watchdog.stops_at_once(acted=acted)

    def folder(self) -> Path:
        """One for files of this rank, which goes with it."""
        if self._folder is None:
            self._folder = ScratchFolder()
        return self._folder.path

    def remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def begins(self, step: int) -> None:
        """The loop takes this step, and so must that of every other rank."""
        self._steps = step + 1
        if self.watchdog is not None:
            self.watchdog.begins(step)

    def leaves(self) -> None:
        """The loop takes no more steps."""
        if self.watchdog is not None:
            self.watchdog.leaves(self._steps)

    def close(self) -> None:
        """Leave the process group, where it is ours. Collective."""
        self.leaves()
        atexit.unregister(self.close)
        if self._usual is not None:
            sys.excepthook, self._usual = self._usual, None
        self._joined.close()

    def _watch_exceptions(self) -> None:
        usual = self._usual = sys.excepthook

        def ends(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                self._joined.__exit__(kind, error, trace)
            except Ended as end:
                self.remove_folder()
                end_process(end.failure, tells=end.tells)
            if isinstance(error, UserError):
                self.remove_folder()
                end_process(failure_of(error), tells=True)
            usual(kind, error, trace)

        sys.excepthook = ends
        atexit.register(self.close)


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
