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

What a rank of this host was in last is in memory that it leaves. That a rank of an agent has told the
failure is a file of the host: the store may have ended by then.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from arachnec.ir.diagnostic import Diagnostic, Mistake, UserError, counted
from arachnec.launch.ending import (
    SIGNALS,
    Failure,
    StopRequest,
    failure_of,
    first_to_tell,
    follows_from_another,
    record_failure,
)
from arachnec.launch.environment import ERROR_FD
from arachnec.launch.peers import Member, Peers, rank_gone
from arachnec.launch.phases import LastPlace, Place, Progress, behind, held_up_by

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
PACKAGE = Path(__file__).parents[1]


class Left(msgspec.Struct, frozen=True):
    """A rank that takes no more steps, and how many it took."""

    rank: int
    steps: int


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
        self._peers = Peers(store, self._me, world)
        self._phase = _Phase("start", None, "", time.monotonic())
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
        if not self._peers.all_known:  # its siblings are to know it before they can lose it
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
        self._peers.close()
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
        me = self._me
        gone = [member for member in self._peers.known_siblings() if not member.alive()]
        if gone:
            return rank_gone(gone[0], self._world, GONE, self._peers.last_of(gone[0].rank))
        return Mistake(
            None,
            f"rank {me.rank} on host {me.host} cannot reach the rendezvous store any more ({reason})",
            help=(
                f"the first node keeps it: it has ended or the network between it and {me.host} is cut; its own "
                "output says more"
            ),
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
        member = self._peers.gone()
        return None if member is None else self._rank_gone(member, GONE)

    def _silent(self) -> Diagnostic | None:
        """The next rank, if it beats no more."""
        member, seconds = self._peers.silent(self._lapse_of)
        return None if member is None else self._rank_gone(member, f"has given no sign of life for {seconds:.0f} s")

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
        places, me = self._peers.places(range(self._world)), self._me
        cause = ""
        if phase.progress is not None:
            other = held_up_by(me.rank, places, phase.progress.awaited)
            place = places.get(other, Place())
            cause = f"; it waits for rank {other}, in {place.doing or place.phase}" if other != me.rank else ""
        return Mistake(
            None,
            f"rank {me.rank} on host {me.host} has been in {phase.name} for {seconds:.1f} s; its limit is "
            f"{phase.limit:g} s{cause}",
            help=f"if it was only slow, raise the limit with {phase.option}; ranks stood at:\n{_listed(places)}",
        )

    def _stalled(self) -> Diagnostic | None:
        """This rank itself, where it has been in an instruction for too long and nobody holds it up."""
        own, progress, me = self._place, self._phase.progress, self._me
        if progress is None or own.limit is None or own.seconds < own.limit:
            return None
        awaited = progress.awaited(me.rank, own.position)
        places = self._peers.places(awaited)
        if behind(awaited, places):
            return None  # such a rank speaks for itself
        seconds = min([own.seconds, *(place.seconds for place in places.values())])  # since the last of them came
        if seconds < own.limit:
            return None
        plural = "s" if len(awaited) > 1 else ""
        ranks = ", ".join(map(str, sorted(awaited)))
        others = f", where rank{plural} {ranks} came too: the network between them may be cut" if awaited else ""
        everyone = _listed(self._peers.places(range(self._world)))
        return Mistake(
            None,
            f"rank {me.rank} on host {me.host} is silent: in {own.phase} it has been in {own.doing} for {seconds:.0f} "
            f"s{others}",
            help=(
                f"its limit is {own.limit:g} s; if it was only slow, raise that with --stall-timeout; ranks stood at:\n"
                f"{everyone}"
            ),
        )

    def _deserted(self) -> Diagnostic | None:
        """A rank that left its loop before the step that this one is in."""
        if self._step < 0 or not self._store.check(["loop-left"]):
            return None
        left = msgspec.json.decode(self._store.get("loop-left"), type=Left)
        if self._step < left.steps:
            return None
        return Mistake(
            None,
            f"rank {left.rank} left its loop after {counted(left.steps, 'step')}, and rank {self._me.rank} is in step "
            f"{self._step}",
            help=(
                "a step needs all ranks: leave the loop on every rank behind the same step, by break, return, "
                "sys.exit or an exception that you catch"
            ),
        )

    def _cause_of_sigterm(self) -> Diagnostic | None:
        """An agent that ends its ranks does so because one of them is gone; which one may show a moment later."""
        for _ in range(10):
            time.sleep(self._limits.poll / 5)
            if (gone := self._gone()) is not None:
                return gone
        return None

    def _rank_gone(self, member: Member, what: str) -> Mistake:
        last = self._peers.last_of(member.rank)
        if not last and (place := self._peers.places([member.rank]).get(member.rank)) is not None:
            last = f"; it was last seen in {place.text()}{self._since(member.rank, place)}"
        return rank_gone(member, self._world, what, last)

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
        return ERROR_FD in os.environ or first_to_tell(f"{self._run} {self._me.agent}")

    def _hold(self) -> None:
        """Stay a moment where the store may end with this rank, for the other agents to read the reason."""
        if self._peers.of_several_agents:
            time.sleep(self._limits.hold)

    def _stop(self, failure: Failure) -> None:
        if not self._ended_by.acquire(blocking=False):
            return  # the main thread ends the process itself
        if self._tells():
            record_failure(failure)
        if self._peers.first_is_sibling:
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
