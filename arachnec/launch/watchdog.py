"""A thread in every rank that ends it when another rank has failed, or when it takes too long.

It talks to the other ranks through the rendezvous store alone, so it depends on no timeout of NCCL or gloo, and it ends
the process from beside the main thread, which may be waiting for a collective that will never come. The store's keys:

- ``failure``: the first failure of any rank; whoever sees it ends.
- ``member/r``: where rank r runs. Ranks of one agent (one torchrun, one launcher) see at once when a sibling's process
  is gone.
- ``at/r``: a counter and where rank r stands (``Place``), written every few seconds. Rank r watches that of rank r + 1,
  so the messages grow with the ranks, not with their square, and of neighbours that die together the first is noticed.
  A rank that has been in one instruction for too long ends the run if all the ranks that it waits for have come to it:
  then nobody else holds it up.
- ``done/r``: rank r has nothing left to do with others. It stays until all ranks say so, watched as before.
- ``left/r``: rank r knows that all are done, and asks the store no more.
- ``loop-left``: a rank that left its loop for good, and after how many steps. A rank in a later step waits for it in
  vain.
- ``run``: a name that no other run has.

What a rank of this host was in last is in memory that it leaves (``last_place``). That a rank of an agent has told the
failure is a file of the host: the store may have ended by then.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from arachnec.ir.diagnostic import Diagnostic, UserError, counted
from arachnec.launch.ending import SIGNALS, Failure, StopRequest, failure_of, follows_from_another, record_failure
from arachnec.launch.environment import ERROR_FD, local_cache
from arachnec.launch.phases import LastPlace, Place, Progress, behind, held_up_by, open_memory, read_place
from arachnec.launch.rank_faults import LoopLeft, RankGone, Stalled, StoreLost, TookTooLong

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

POLL_S = 0.5
AFTER_LOOP_S = 0.1  # a signal that was noted in a loop comes again
LEAVE_POLL_S = 0.05  # between two looks whether all ranks are done
BEAT_S = 2.0
LAPSE_S = 20.0  # without a beat a rank counts as dead
HOLD_S = 1.5  # that a failing rank stays, for the others to read why
GONE = "was killed or crashed: its process is gone"
STORE_S = 10.0  # that an answer of the store may take
MARK_S = 3600.0  # s that a mark outlives its failure: all ranks of a run have ended long before
PACKAGE = Path(__file__).parents[1]


class Left(msgspec.Struct, frozen=True):
    """A rank that takes no more steps, and how many it took."""

    rank: int
    steps: int


class Member(msgspec.Struct, frozen=True):
    """A rank's process."""

    rank: int
    host: str
    pid: int
    agent: str  # processes of one agent see each other's ids
    place: int = -1  # the descriptor under which it notes where it is

    @classmethod
    def here(cls, rank: int, place: int = -1) -> Member:
        host = socket.gethostname()
        try:
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            space = ""
        return cls(rank, host, os.getpid(), f"{host}:{space}:{os.getppid()}", place)

    def alive(self) -> bool:
        """Whether the process exists; asked by its siblings only."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True


@dataclass(frozen=True)
class Limits:
    """How often the watchdog looks, in seconds."""

    poll: float = POLL_S
    beat: float = BEAT_S
    lapse: float = LAPSE_S
    hold: float = HOLD_S
    answer: float = LAPSE_S  # that a look at the store may take


@dataclass
class _Phase:
    name: str
    limit: float | None
    option: str
    started: float
    progress: Progress | None = None


@dataclass
class _Beats:
    """When the counter of the next rank was last seen to change."""

    text: str = ""
    changed: float = field(default_factory=time.monotonic)

    def silent_for(self, text: str) -> float:
        now = time.monotonic()
        if text != self.text:
            self.text, self.changed = text, now
        return now - self.changed


class Watchdog:
    """Watches over one rank. ``store`` is a connection of its own: another's may be blocked by a wait."""

    def __init__(
        self, store: Store, rank: int, world: int, limits: Limits | None = None, end: Callable[[int], object] = os._exit
    ) -> None:
        self._store = store
        self._world = world
        self._limits = limits or Limits()
        self._end = end
        self._last = LastPlace()
        self._me = Member.here(rank, self._last.descriptor)
        self._members: dict[int, Member] = {}
        self._memories: dict[int, int] = {}  # of siblings' last places, by rank
        self._phase = _Phase("start", None, "", time.monotonic())
        self._beats = _Beats()
        self._next_beat = 0.0
        self._place = Place()
        self._step = -1  # of a loop of somebody's own
        self._stop_request: StopRequest | None = None
        self._own_interrupts = False
        self._closing = threading.Event()
        self._ended_by = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._restore = self._catch_sigterm()
        self._watched = threading.main_thread().ident
        self._run = store.compare_set("run", "", uuid.uuid4().hex).decode()
        store.set(f"member/{rank}", msgspec.json.encode(self._me).decode())
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None) -> None:
        """From now on this rank is in ``phase``, for at most ``limit`` seconds; ``option`` is what sets the limit, and
        ``progress`` knows what the rank does in it."""
        self._phase = _Phase(phase, limit, option, time.monotonic(), progress)
        self._last.note(Place(phase=phase))
        if progress is not None:
            progress.tell(lambda place: self._last.note(msgspec.structs.replace(place, phase=phase)))
        if len(self._members) < self._world:  # its siblings are to know it before they can lose it
            self._next_beat = 0.0
            os.write(self._wake_write, b"\0")

    def stops_after_step(self) -> StopRequest:
        """From now on the first SIGTERM or Ctrl-C is noted in what is returned, and a second one ends this rank."""
        if self._stop_request is None:
            self._stop_request = StopRequest()
            if threading.current_thread() is threading.main_thread() and (
                signal.getsignal(signal.SIGINT) is signal.default_int_handler
            ):
                request = self._stop_request
                signal.signal(signal.SIGINT, lambda signum, frame: request.note(signum))
                self._own_interrupts = True
        return self._stop_request

    def stops_at_once(self, *, acted: bool) -> None:
        """From now on such a signal ends this rank at once again, and one that was noted does so now; unless that was
        ``acted`` upon, and this rank is on its way out."""
        if acted:
            return
        request, self._stop_request = self._stop_request, None
        if self._own_interrupts and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._own_interrupts = False
        if request is not None and request.signum and self._watched is not None:
            # a generator that is closed would drop a KeyboardInterrupt
            again = threading.Timer(AFTER_LOOP_S, signal.pthread_kill, (self._watched, request.signum))
            again.daemon = True
            again.start()

    def begins(self, step: int) -> None:
        """This rank begins a step, which all ranks are to take."""
        self._step = step

    def leaves(self, steps: int) -> None:
        """This rank takes no more steps after so many."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set("loop-left", "", msgspec.json.encode(Left(self._me.rank, steps)).decode())

    def failed(self, error: BaseException) -> tuple[Failure, bool]:
        """Tell all ranks of this rank's exception.

        Returns the failure that the run ends with, and whether this rank is to tell it. Where the exception only
        follows from another rank's end, that is waited for, and the thread ends the process when it comes.
        """
        if follows_from_another(error):
            time.sleep(self._limits.lapse + self._limits.beat + 4 * self._limits.poll)
        self._ended_by.acquire()  # for good: either the thread ends the process, or this rank does
        failure = self._publish(failure_of(error))
        tells = self._tells()
        self._hold()
        return failure, tells

    def close(self) -> None:
        """This rank has ended well. Returns when all have: one that is lost before is told as in any phase."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"done/{self._me.rank}", "")
            while not self._store.check([f"done/{rank}" for rank in range(self._world)]):
                time.sleep(LEAVE_POLL_S)
        self._closing.set()
        os.write(self._wake_write, b"\0")
        self._thread.join()
        self._restore()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for descriptor in self._memories.values():
            os.close(descriptor)
        self._last.close()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._me.rank}", "")
            if self._me.rank == 0:  # it may keep the store, which the others still ask
                self._store.wait([f"left/{rank}" for rank in range(self._world)], timedelta(seconds=STORE_S))

    def _watch(self) -> None:
        asking = ThreadPoolExecutor(1, "watchdog-store")
        while not self._closing.is_set():
            told_to_end = self._sleep()
            request = self._stop_request
            if told_to_end and request is not None and request.take(told_to_end):
                told_to_end = frozenset()
            try:
                asked = asking.submit(self._look, told_to_end)
            except RuntimeError:  # a script of one's own has ended: pools take no more work, while ranks take leave
                asked = None
            try:
                failure = self._look(told_to_end) if asked is None else asked.result(self._limits.answer)
            except (RuntimeError, TimeoutError) as error:
                failure = _failure(self._without_store(str(error).partition("\n")[0] or "no answer"))
            if failure is not None and not self._closing.is_set():
                self._stop(failure)
                return
        asking.shutdown(wait=False)

    def _sleep(self) -> frozenset[int]:
        """Wait until it is time to look again; the signals that told the process to end meanwhile."""
        ready, _, _ = select.select([self._wake_read], [], [], self._limits.poll)
        heard = SIGNALS if self._own_interrupts else (signal.SIGTERM,)  # else Ctrl-C is the main thread's
        return frozenset(os.read(self._wake_read, 4096) if ready else b"") & frozenset(heard)

    def _look(self, told_to_end: frozenset[int]) -> Failure | None:
        """One look at the others: why this rank must end, or None."""
        if (failure := self._published()) is not None:
            return failure
        beaten = self._beat()
        cause = self._gone() or self._silent() or self._late()
        if cause is None and beaten:
            cause = self._deserted() or self._stalled()
        if cause is None and told_to_end:
            cause = self._cause_of_sigterm()
            if cause is None:
                told = self._rank_gone(self._me, f"was told to end ({signal.Signals(min(told_to_end)).name})")
                return self._publish(msgspec.structs.replace(_failure(told), told_to_end=True))
        return None if cause is None else self._publish(_failure(cause))

    def _without_store(self, reason: str) -> Diagnostic:
        """Why there may be no store any more: a rank of this agent may have kept it."""
        me, known = self._me, self._members.values()
        gone = [member for member in known if member.agent == me.agent and member != me and not member.alive()]
        return (
            RankGone(None, gone[0].rank, self._world, me.host, GONE, self._last_of(gone[0].rank))
            if gone
            else StoreLost(None, me.rank, me.host, reason)
        )

    def _beat(self) -> bool:
        """Tell where this rank stands, if it is time to."""
        now = time.monotonic()
        if now < self._next_beat:
            return False
        self._next_beat = now + self._limits.beat
        phase, last = self._phase, self._place
        doing = Place(position=last.position) if phase.progress is None else phase.progress.place()
        self._place = msgspec.structs.replace(
            doing, count=last.count + 1, phase=phase.name, line=_line_of(self._watched)
        )
        self._store.set(f"at/{self._me.rank}", msgspec.json.encode(self._place).decode())
        return True

    def _gone(self) -> Diagnostic | None:
        """A rank of this agent whose process is there no more."""
        for member in self._siblings():
            if not member.alive() and not self._store.check([f"done/{member.rank}"]):
                return self._rank_gone(member, GONE)
        return None

    def _silent(self) -> Diagnostic | None:
        """The next rank, if it beats no more."""
        following = (self._me.rank + 1) % self._world
        if following == self._me.rank or not self._store.check([f"at/{following}"]):
            return None
        told = self._store.get(f"at/{following}").decode()
        silence = self._beats.silent_for(told)
        if silence < self._lapse_of(msgspec.json.decode(told, type=Place)):
            return None
        if self._store.check([f"done/{following}"]):
            return None
        member = msgspec.json.decode(self._store.get(f"member/{following}"), type=Member)
        return self._rank_gone(member, f"has given no sign of life for {silence:.0f} s")

    def _lapse_of(self, place: Place) -> float:
        """How long a rank that last stood there may be silent: no longer than what it did may take, but some beats."""
        return min(self._limits.lapse, max(place.limit or math.inf, 3 * self._limits.beat))

    def _late(self) -> Diagnostic | None:
        phase = self._phase
        seconds = time.monotonic() - phase.started
        if phase.limit is None or seconds < phase.limit:
            return None
        self._next_beat = 0.0
        self._beat()
        places, me = self._places(range(self._world)), self._me
        cause = ""
        if phase.progress is not None:
            other = held_up_by(me.rank, places, phase.progress.awaited)
            place = places.get(other, Place())
            cause = f"; it waits for rank {other}, in {place.doing or place.phase}" if other != me.rank else ""
        return TookTooLong(
            None, me.rank, me.host, phase.name, seconds, phase.limit, phase.option, cause, _listed(places)
        )

    def _stalled(self) -> Diagnostic | None:
        """This rank itself, where it has been in an instruction for too long and nobody holds it up."""
        own, progress, me = self._place, self._phase.progress, self._me
        if progress is None or own.limit is None or own.seconds < own.limit:
            return None
        awaited = progress.awaited(me.rank, own.position)
        places = self._places(awaited)
        if behind(awaited, places):
            return None  # such a rank speaks for itself
        seconds = min([own.seconds, *(place.seconds for place in places.values())])  # since the last of them came
        if seconds < own.limit:
            return None
        plural = "s" if len(awaited) > 1 else ""
        ranks = ", ".join(map(str, sorted(awaited)))
        others = f", where rank{plural} {ranks} came too: the network between them may be cut" if awaited else ""
        everyone = _listed(self._places(range(self._world)))
        return Stalled(None, me.rank, me.host, own.phase, own.doing, seconds, others, own.limit, everyone)

    def _deserted(self) -> Diagnostic | None:
        """A rank that left its loop before the step that this one is in."""
        if self._step < 0 or not self._store.check(["loop-left"]):
            return None
        left = msgspec.json.decode(self._store.get("loop-left"), type=Left)
        if self._step < left.steps:
            return None
        return LoopLeft(None, left.rank, counted(left.steps, "step"), self._me.rank, self._step)

    def _cause_of_sigterm(self) -> Diagnostic | None:
        """An agent that ends its ranks does so because one of them is gone; which one may show a moment later."""
        for _ in range(10):
            time.sleep(self._limits.poll / 5)
            if (gone := self._gone()) is not None:
                return gone
        return None

    def _siblings(self) -> list[Member]:
        if len(self._members) < self._world:
            keys = [f"member/{rank}" for rank in range(self._world)]
            if not self._store.check(keys):
                return []
            members = [msgspec.json.decode(data, type=Member) for data in self._store.multi_get(keys)]
            self._members.update((member.rank, member) for member in members)
            self._memories = _memories(self._of_this_agent())
        return self._of_this_agent()

    def _of_this_agent(self) -> list[Member]:
        return [member for member in self._members.values() if member.agent == self._me.agent and member != self._me]

    def _rank_gone(self, member: Member, what: str) -> RankGone:
        last = self._last_of(member.rank)
        if not last and (place := self._places([member.rank]).get(member.rank)) is not None:
            last = f"; it was last seen in {place.text()}{self._since(member.rank, place)}"
        return RankGone(None, member.rank, self._world, member.host, what, last)

    def _last_of(self, rank: int) -> str:
        """What a rank of this host was in last, to the instruction; empty for one of another host."""
        memory = self._memories.get(rank)
        place = None if memory is None else read_place(memory)
        return "" if place is None else f"; it was in {place.text()}"

    def _since(self, rank: int, seen: Place) -> str:
        """What is known of a rank that went on for some steps after it was last seen: what they do in this one."""
        phase = self._phase
        if phase.progress is None:
            return ""
        own = msgspec.structs.replace(phase.progress.place(), phase=phase.name, line=_line_of(self._watched))
        if own.position.step <= seen.position.step:
            return ""
        awaited = phase.progress.awaited(self._me.rank, own.position).get(rank)
        work = phase.progress.work(rank, awaited)
        stands = f"rank {self._me.rank} stood in {own.text()}"
        return f"; since then it came to {phase.name}, and was to do {work} there; {stands}"

    def _places(self, ranks: Iterable[int]) -> dict[int, Place]:
        """Where these ranks stood last, as far as they have told."""
        known = [rank for rank in ranks if self._store.check([f"at/{rank}"])]
        told = self._store.multi_get([f"at/{rank}" for rank in known]) if known else []
        return {rank: msgspec.json.decode(text, type=Place) for rank, text in zip(known, told, strict=True)}

    def _published(self) -> Failure | None:
        if not self._store.check(["failure"]):
            return None
        return msgspec.json.decode(self._store.get("failure"), type=Failure)

    def _publish(self, failure: Failure) -> Failure:
        """Make it the run's failure, unless there is one already; the run's failure."""
        try:
            first = self._store.compare_set("failure", "", msgspec.json.encode(failure).decode())
        except RuntimeError:  # no store any more, so nobody else can be told
            return failure
        return msgspec.json.decode(first, type=Failure)

    def _tells(self) -> bool:
        """Whether this rank tells the failure: one of each agent's does, and with a launcher, which chooses, all."""
        if ERROR_FD in os.environ:
            return True
        name = hashlib.sha256(f"{self._run} {self._me.agent}".encode()).hexdigest()
        marks = local_cache() / "told"
        try:
            marks.mkdir(parents=True, exist_ok=True)
            for mark in marks.iterdir():  # of runs that ended long ago; which rank of a run ends last is not known
                if time.time() - mark.stat().st_mtime > MARK_S:
                    mark.unlink(missing_ok=True)
            (marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True  # better twice than not at all
        return True

    def _hold(self) -> None:
        """Stay a moment where the store may end with this rank, for the other agents to read the reason."""
        if len({member.agent for member in self._members.values()}) != 1:
            time.sleep(self._limits.hold)

    def _stop(self, failure: Failure) -> None:
        if not self._ended_by.acquire(blocking=False):
            return  # the main thread ends the process itself
        if self._tells():
            record_failure(failure)
        if 0 in self._members and self._members[0].agent == self._me.agent:
            self._hold()
        sys.stdout.flush()
        self._end(failure.exit_code)

    def _catch_sigterm(self) -> Callable[[], None]:
        """Have a SIGTERM wake the thread, wherever the main thread is; returns what puts the old handler back."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        descriptor = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        handler = signal.signal(signal.SIGTERM, lambda signum, frame: None)

        def restore() -> None:
            signal.set_wakeup_fd(descriptor)
            signal.signal(signal.SIGTERM, handler)
            if self._own_interrupts:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        return restore


def _memories(members: Iterable[Member]) -> dict[int, int]:
    """The memories of these ranks' last places that can be opened, by rank."""
    opened = {member.rank: open_memory(member.pid, member.place) for member in members if member.place >= 0}
    return {rank: memory for rank, memory in opened.items() if memory is not None}


def _failure(diagnostic: Diagnostic) -> Failure:
    return failure_of(UserError(diagnostic))


def _listed(places: dict[int, Place]) -> str:
    return "\n".join(f"    rank {rank}: {place.text()}" for rank, place in sorted(places.items()))


def _line_of(thread: int | None) -> str:
    """The innermost line of this package that a thread is in."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
