"""Start the ranks of one machine, pass on what rank 0 reports, and take all of them down when one fails.

The processes get torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, ...), so that the worker cannot tell whether
``arachnec run`` or ``torchrun`` started it. The launcher keeps the rendezvous store itself, on a port the system picks:
no port is guessed, and a dying rank 0 does not take the store along.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING

from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.launch.ending import AGAIN_S, Failure, exit_code, read_failure
from arachnec.launch.environment import (
    AGENTS_STORE,
    CHECKED,
    ERROR_FD,
    EVENTS_FD,
    PLACE_FD,
    prepare_environment,
    show_gpus,
)
from arachnec.launch.phases import new_memory, read_place
from arachnec.solver.budget import usable_cores

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

WORKER = "arachnec.backends.torch_distributed.worker"
GRACE_S = 3.0
ENDING = (signal.SIGTERM, signal.SIGHUP)
STOPPED = exit_code(signal.SIGTERM)  # of a rank that has ended after its step, as it was told to
POLL_S = 0.1
STOPPED_S = 60.0  # that all ranks may be stopped: one that is not tells of the others by itself
LEAVE_S = 60.0  # that a process may take to end after the first: ranks end when all have done their work


@dataclass(frozen=True)
class RankDied(Diagnostic):
    title = "rank {rank} of {world} {what}; the others were stopped; {last}"
    help = "{remedy}"
    rank: int
    world: int
    what: str
    last: str
    remedy: str


class RankCrashed(Exception):
    """A rank raised something that is not a user's mistake; the text is that rank's traceback."""


@contextmanager
def crash_told() -> Iterator[None]:
    """A rank that crashes inside ends this process with the rank's own traceback: the launcher's would only hide it."""
    try:
        yield
    except RankCrashed as crash:
        print(crash, file=sys.stderr)
        sys.exit(1)


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    error_file: IO[bytes]  # without a name, so that nothing is left where the launcher is killed
    place: int  # of the memory of where it was last


def launch(
    world: int,
    arguments: Sequence[str],
    on_event: Callable[[bytes], object],
    *,
    worker: str = WORKER,
    leave_s: float = LEAVE_S,
    stopped_s: float | None = None,
    beside: Callable[[], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Run the worker with ``arguments`` on ``world`` local ranks; returns when all have ended well.

    ``on_event`` gets each line that rank 0 reports. ``beside`` is done while ranks start; what it raises ends them
    before they leave anything. Raises ``UserError`` for a user's mistake, for a rank that was killed, for all that are
    stopped for ``stopped_s`` (60 where it is not said), when no rank is left to tell, and for one that is still there
    ``leave_s`` after the first has ended well: ranks end together, so nobody watches over it any more. ``RankCrashed``
    with one traceback for a bug.

    With ``on_stop`` the first SIGTERM or Ctrl-C is passed on to ranks, which end after their step, and ``on_stop``
    tells of it. Then, and where a rank was told by itself, it exits with 128 and the signal's number.
    """
    with ExitStack() as open_files, _told_to_end(on_stop) as told:
        listening = socket.create_server(("127.0.0.1", 0))  # by itself the store would listen on all interfaces
        open_files.callback(listening.close)
        port = listening.getsockname()[1]
        reading, writing = os.pipe()
        ranks: list[_Rank] = []
        try:
            environment = _environment(world, port) | ({} if beside is None else {CHECKED: "1"})
            error_files = [open_files.enter_context(tempfile.TemporaryFile()) for _ in range(world)]
            places = [new_memory() for _ in range(world)]
            for place in places:
                open_files.callback(os.close, place)
            own = [_of_rank(*rank) for rank in zip(range(world), error_files, places, strict=True)]
            own[0][EVENTS_FD] = str(writing)
            for number, more in enumerate(own):
                process = _started([worker, *arguments], environment, more)
                ranks.append(_Rank(number, process, error_files[number], places[number]))
                told.look()
            os.close(writing)
            store = _store(listening)
            if beside is not None:
                with told.at_once():
                    beside()
                store.set(CHECKED, "")
            first = _watch(ranks, reading, on_event, leave_s, STOPPED_S if stopped_s is None else stopped_s, told)
            if first is not None:
                _stop(ranks)
                told.look_after(first)
                raise _explain(first, ranks)
            if any(rank.process.returncode == STOPPED for rank in ranks):
                sys.exit(exit_code(told.signum or signal.SIGTERM))
        finally:
            _stop(ranks)
            os.close(reading)


def _store(listening: socket.socket) -> Store:
    """The rendezvous store at that socket, where ranks may be waiting for it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        "127.0.0.1",
        listening.getsockname()[1],
        world_size=None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _started(command: Sequence[str], environment: Mapping[str, str], own: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """The process of a rank, which has its ``own`` environment on top of the common one, and the open files that it
    names."""
    with _without_interrupts():
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**environment, **own},
            pass_fds=[int(value) for name, value in own.items() if name.endswith("_FD")],
            stdin=subprocess.DEVNULL,
        )


def _environment(world: int, port: int) -> dict[str, str]:
    """What all ranks have."""
    environment = dict(os.environ)
    show_gpus(environment)
    prepare_environment(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // world)))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        AGENTS_STORE: "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _of_rank(rank: int, error_file: IO[bytes], place: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FD: str(error_file.fileno()), PLACE_FD: str(place)}


def _watch(
    ranks: Sequence[_Rank],
    events: int,
    on_event: Callable[[bytes], object],
    leave_s: float,
    stopped_s: float,
    told: _Told,
) -> _Rank | None:
    """Pass events on until every rank has ended; the first rank that ended badly, or None."""
    waiting = b""
    first_ended: float | None = None
    moved = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(events, selectors.EVENT_READ)
        open_pipe = True
        while True:
            told.look(ranks)
            if open_pipe and selector.select(POLL_S):
                chunk = os.read(events, 65536)
                open_pipe = bool(chunk)
                *lines, waiting = (waiting + chunk).split(b"\n")
                for line in lines:
                    on_event(line)
                continue
            if not open_pipe:
                time.sleep(POLL_S)
            codes = [rank.process.poll() for rank in ranks]
            bad = [rank for rank, code in zip(ranks, codes, strict=True) if code not in (None, 0, STOPPED)]
            if bad:
                return _cause(bad)
            ended = [code is not None for code in codes]
            if all(ended) and not open_pipe:
                return None
            if not all(is_stopped(rank.process.pid) for rank in ranks):
                moved = time.monotonic()
            elif (seconds := time.monotonic() - moved) > stopped_s:
                raise user_error(
                    f"all {len(ranks)} ranks were stopped for {seconds:.0f} s",
                    help="only a signal such as SIGSTOP does that; they were ended, run again with `--resume`",
                )
            if any(ended):
                first_ended = first_ended or time.monotonic()
                if (seconds := time.monotonic() - first_ended) > leave_s:
                    if all(ended):
                        return None  # a process that a rank has left holds the pipe
                    raise user_error(
                        f"rank {codes.index(None)} of {len(ranks)} has done its work and does not end, {seconds:.0f} s "
                        "after the others",
                        help="it was stopped; what the run was to write is whole, and nothing needs to be done again",
                    )


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped it; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(") ")[2].startswith(("T", "t"))
    except OSError:
        return False


def _cause(bad: Sequence[_Rank]) -> _Rank:
    """Of ranks seen to have ended badly together: one that was killed, then a user's mistake, then the earliest."""

    def order(rank: _Rank) -> tuple[int, float]:
        failure = read_failure(rank.error_file.fileno())
        if failure is None:
            return (0, 0.0)
        return (1 if failure.user else 2, failure.time)

    return min(bad, key=order)


def _explain(rank: _Rank, ranks: Sequence[_Rank]) -> Exception:
    failure: Failure | None = read_failure(rank.error_file.fileno())
    if failure is not None and failure.user:
        return user_error(failure.text.removeprefix("error: "))
    if failure is not None:
        return RankCrashed(f"rank {rank.number} failed:\n{failure.text}")
    code = rank.process.returncode
    assert code is not None, "a rank that ended badly has ended"
    what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    remedy = "its own output above says more; if the system was out of memory, use fewer ranks or smaller clips"
    place = read_place(rank.place)
    last = "it had not joined them yet" if place is None else f"it was in {place.text()}"
    return UserError(RankDied(None, rank.number, len(ranks), what, last, remedy))


def _stop(ranks: Sequence[_Rank]) -> None:
    alive = [rank.process for rank in ranks if rank.process.poll() is None]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started inside, and those that it starts, do not see Ctrl-C: the launcher does, and stops
    them. Each would have shown a traceback of wherever it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


@dataclass
class _Told:
    """Whether a signal has told the launcher to end.

    A handler that ended it wherever it was would leave locks of ``subprocess`` taken, which stopping the ranks needs.
    It only notes the signal, and the launcher ends where it looks. With ``on_stop`` it first lets its ranks end, unless
    it is told again.
    """

    on_stop: Callable[[], None] | None = None
    signum: int | None = None
    _at_once: bool = False
    _since: float = 0.0
    _again: bool = False
    _passed_on: bool = False

    def look(self, ranks: Sequence[_Rank] = ()) -> None:
        if self.signum is None:
            return
        if self.on_stop is None or not ranks or self._again:
            sys.exit(exit_code(self.signum))
        if not self._passed_on:
            self._passed_on = True
            self.on_stop()
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.terminate()

    def look_after(self, ended: _Rank) -> None:
        """A rank that could not end after a step yet has ended at once, as it was told."""
        failure = read_failure(ended.error_file.fileno())
        if self.signum is not None and (failure is None or failure.told_to_end):
            sys.exit(exit_code(self.signum))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside it ends wherever it is: what runs there takes long, and starts no ranks."""
        self._at_once = True
        try:
            self.look()
            yield
        finally:
            self._at_once = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._again = self.signum is not None and now - self._since > AGAIN_S
        self._since = self._since or now
        self.signum = self.signum or signum
        for number in ENDING if self.on_stop is None or self._again else ():
            signal.signal(number, signal.SIG_IGN)  # `timeout` tells a process and its group: one is enough
        if self._at_once:
            self.look()


@contextmanager
def _told_to_end(on_stop: Callable[[], None] | None = None) -> Iterator[_Told]:
    """A SIGTERM or SIGHUP to the launcher inside makes it stop its ranks and exit. It stays deaf to others then. With
    ``on_stop`` so does Ctrl-C, and ranks end after their step first. How they end is told even where the launcher was
    started with the end of children ignored."""
    told = _Told(on_stop)
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    heard = ENDING if on_stop is None else (*ENDING, signal.SIGINT)
    old = {number: signal.signal(number, told.handle) for number in heard}
    old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield told
    finally:
        if told.signum is None:
            for number, handler in old.items():
                signal.signal(number, handler)
        if on_stop is None or sys.exc_info()[0] is None:  # what ranks tell at their end is told
            told.look()
