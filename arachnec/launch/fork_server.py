"""Ranks as forks of one process, the server, that has imported what they need: a host imports it once.

For ranks without GPUs alone. Libraries ask for GPUs when they are imported, and a fork of a process that has done so
cannot use them. The server runs nothing of the user's, and nothing that computes: when it forks it has no threads but
BLAS's, which sees to forks itself.

    python -m arachnec.launch.fork_server TASK MODULE ARGUMENTS...
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from arachnec.ir.garbage import without_garbage_collector
from arachnec.launch.start_times import note_imports

POLL_S = 0.02
LOOK_S = 1.0  # after which the server looks whether ranks have ended, told or not


class Task(msgspec.Struct, frozen=True):
    """What the server is to do: import ``modules``, and fork a rank for each environment, which comes on top of its
    own."""

    modules: tuple[str, ...]
    ranks: tuple[dict[str, str], ...]
    tells: int  # where it writes a line for each rank that it has forked, and for each that has ended


class Told(msgspec.Struct, frozen=True):
    """A line of the server's."""

    rank: int
    process: int
    code: int | None = None


@dataclass
class ForkServer:
    """The launcher's side. ``told`` has the last line of every rank."""

    process: subprocess.Popen[bytes]
    listens: int
    told: dict[int, Told] = field(default_factory=dict)
    ended: bool = False
    _waiting: bytes = b""

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        modules: Sequence[str],
        environment: Mapping[str, str],
        ranks: Sequence[dict[str, str]],
    ) -> ForkServer:
        """``command`` is a rank's module and its arguments."""
        listens, tells = os.pipe()
        os.set_blocking(listens, False)
        task = msgspec.json.encode(Task(tuple(modules), tuple(ranks), tells)).decode()
        files = sorted({tells}.union(*(files_of(own) for own in ranks)))
        process = subprocess.Popen(
            [sys.executable, "-m", "arachnec.launch.fork_server", task, *command],
            env=environment,
            pass_fds=files,
            stdin=subprocess.DEVNULL,
        )
        os.close(tells)
        return cls(process, listens)

    def read(self) -> None:
        """Read what the server has told by now. Ranks that it leaves behind are killed: nobody knows how they fare."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                chunk = os.read(self.listens, 65536)
                self.ended = not chunk
                *lines, self._waiting = (self._waiting + chunk).split(b"\n")
                for line in lines:
                    told = msgspec.json.decode(line, type=Told)
                    self.told[told.rank] = told
        if self.ended:
            self.process.wait()
            for rank, told in self.told.items():
                if told.code is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(told.process, signal.SIGKILL)
                    self.told[rank] = Told(rank, told.process, -signal.SIGKILL)

    def close(self) -> None:
        """Its ranks have ended, or are to: so does it."""
        self.process.kill()
        self.process.wait()
        self.read()
        os.close(self.listens)


@dataclass(frozen=True)
class Fork:
    """A rank, to the launcher what ``subprocess.Popen`` is."""

    server: ForkServer
    rank: int

    @property
    def returncode(self) -> int | None:
        told = self.server.told.get(self.rank)
        if told is None and self.server.ended:
            return self.server.process.returncode or 1
        return None if told is None else told.code

    def poll(self) -> int | None:
        self.server.read()
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def is_stopped(self) -> bool:
        """It, or the server, which alone could tell how it ends."""
        told = self.server.told.get(self.rank)
        return is_stopped(self.server.process.pid) or (told is not None and is_stopped(told.process))

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is not None:
            return
        self.server.process.send_signal(signal.SIGCONT)  # a stopped one would not tell
        told = self.server.told.get(self.rank)
        if told is None:  # it is not there yet, and will not be
            self.server.process.send_signal(number)
        else:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(told.process, number)


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped it; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(") ")[2].startswith(("T", "t"))
    except OSError:
        return False


def serve(task: Task, command: list[str]) -> None:
    """Import, fork the ranks, and tell how they end. Returns in the ranks, and in the server when all have ended."""
    note_imports(os.environ)
    launcher = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it was ignored, nobody would be told that a rank has ended
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    with without_garbage_collector():
        for module in task.modules:
            with contextlib.suppress(Exception):  # a rank imports it again, and says what is wrong with it
                importlib.import_module(module)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on the launcher ends the ranks
    processes: dict[int, int] = {}
    for number, own in enumerate(task.ranks):
        if os.getppid() != launcher:  # it was killed: nobody would end them
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of BLAS's threads
            process = os.fork()
        if process == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD,))
            for file in {task.tells}.union(*(files_of(other) for other in task.ranks)) - files_of(own):
                os.close(file)
            os.environ.update(own)
            sys.argv = command
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
            return
        processes[number] = process
        _tell(task, Told(number, process))
    for file in set().union(*(files_of(own) for own in task.ranks)):
        os.close(file)
    while processes:
        for number, process in list(processes.items()):
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                _tell(task, Told(number, process, ended.si_status if exited else -ended.si_status))
                os.waitpid(process, 0)  # once it is told: the launcher may send signals to that number until then
                del processes[number]
        if processes:
            signal.sigtimedwait((signal.SIGCHLD,), LOOK_S)


def _tell(task: Task, told: Told) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone, and the ranks will see that it is
        os.write(task.tells, msgspec.json.encode(told) + b"\n")


def files_of(own: Mapping[str, str]) -> set[int]:
    """The open files that a rank's own environment names."""
    return {int(value) for name, value in own.items() if name.endswith("_FD")}


if __name__ == "__main__":
    serve(msgspec.json.decode(sys.argv[1], type=Task), sys.argv[2:])
