"""Rounds of a run: ranks tell how switches come out, rank 0 has the rest planned again, every rank goes on with that.

All travels through the rendezvous store, as text. A rank that comes to ``replan`` of a round waits for the program of
this round and for nobody else; ranks that are still busy come to it later. Each reads the same text, once written, so
all lists are of one program, and that was proved before it was written.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Module, quantity
from arachnec.ir.sampling import outcomes_of
from arachnec.launch.phases import GROUP_TIMEOUT

POLL_S = 0.02
FIRST = 0.25  # of a round, that planning is expected to take before it has
KEPT = "-"  # in place of a program: the one that ranks have goes on
PATIENCE = 0.2  # of a round, for which a rank that comes to its end waits for the next program


class RoundStore(Protocol):
    """What is asked of a store of ``torch.distributed``."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass
class Rounds:
    """A rank's side. ``store`` is used by this thread alone."""

    rank: int
    store: RoundStore
    waited_s: float = 0.0
    taken: int = 0  # programs that were taken over

    def enter(self, round: int) -> None:
        """The rank begins a round."""
        if not self.store.check([f"entered/{round}"]):
            self.store.set(f"entered/{round}", str(self.rank))

    def tell(self, request: int, step: int, switched: int | None) -> None:
        """A request has taken so many steps, and has switched or not."""
        self.store.set(f"switch/{request}", f"{step} {-1 if switched is None else switched}")

    def next_program(self, round: int) -> str | None:
        """The text of the program that goes on behind ``replan`` of a round; None where it is the one at hand."""
        started = time.monotonic()
        if not self.store.check([f"comes/{round}"]):
            self.store.set(f"comes/{round}", str(self.rank))
        while not self.store.check([f"program/{round}"]):
            if time.monotonic() - started > GROUP_TIMEOUT.total_seconds():
                raise user_error(
                    f"rank {self.rank} waits in vain for the program of round {round}",
                    help="rank 0, which plans it, has ended or hangs; its own output says more",
                )
            time.sleep(POLL_S)
        text = self.store.get(f"program/{round}").decode()
        self.waited_s += time.monotonic() - started
        if text == KEPT:
            return None
        self.taken += 1
        return text


Plan = Callable[[int, dict[int, tuple[int, int]]], tuple[str, float | None]]
"""The program behind ``replan`` of a round, given the windows of switches, and how many seconds its next round has;
None where there is no next."""


@dataclass
class RoundPlanner:
    """Rank 0's other side: a thread that has every next round planned while ranks execute the one before.

    It asks as late as planning can be hidden, so that it knows most. Where a plan fails, or a rank would wait for it
    for longer than ``patience_s``, that is told on stderr, and the program at hand goes on.
    """

    store: RoundStore
    plan: Plan
    windows: dict[int, tuple[int, int]]  # of the requests whose switch is open
    length_s: float
    patience_s: float
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="round-planner", daemon=True)
        self._thread.start()

    def close(self, interrupt: Callable[[], None] = lambda: None) -> None:
        """Wait for the thread; ``interrupt`` ends what it may wait for."""
        self.ended.set()
        interrupt()
        self._thread.join()

    def _run(self) -> None:
        length: float | None = self.length_s
        round, took = 0, FIRST * self.length_s
        while length is not None and self._entered(round):
            self._wait(round + 1, max(0.0, length - 2 * took))
            started, text = time.monotonic(), KEPT
            answer = self._asked(round + 1, self._known())
            try:
                if self._in_time(round + 1, answer):
                    text, length = answer.result()
                else:
                    length = None
                    print(f"round {round + 1} stays as planned: planning takes longer than it", file=sys.stderr)
            except UserError as error:
                if self.ended.is_set():
                    return
                print(f"round {round + 1} stays as planned: {error}", file=sys.stderr)
                length = None
            finally:
                self.store.set(f"program/{round + 1}", text)
            round, took = round + 1, time.monotonic() - started

    def _asked(self, round: int, known: dict[int, tuple[int, int]]) -> Future[tuple[str, float | None]]:
        """The next plan, made beside this thread."""
        answer: Future[tuple[str, float | None]] = Future()

        def ask() -> None:
            try:
                answer.set_result(self.plan(round, known))
            except Exception as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="round-plan", daemon=True).start()
        return answer

    def _in_time(self, round: int, answer: Future[tuple[str, float | None]]) -> bool:
        """Whether it is there before a rank has waited for longer than it may."""
        until = math.inf
        while not answer.done():
            if until == math.inf and self.store.check([f"comes/{round}"]):
                until = time.monotonic() + self.patience_s
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def _entered(self, round: int) -> bool:
        while not self.store.check([f"entered/{round}"]):
            if self.ended.wait(POLL_S):
                return False
        return True

    def _wait(self, round: int, seconds: float) -> None:
        """So long, or until the first rank comes to the round."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.store.check([f"comes/{round}"]) and not self.ended.wait(POLL_S):
            pass

    def _known(self) -> dict[int, tuple[int, int]]:
        """The windows by what the ranks have told."""
        for request, (least, most) in self.windows.items():
            if least < most and self.store.check([f"switch/{request}"]):
                step, switched = map(int, self.store.get(f"switch/{request}").split())
                known = (switched, switched) if switched >= 0 else (min(most, max(least, step + 1)), most)
                self.windows[request] = known
        return dict(self.windows)


def open_windows(module: Module) -> dict[int, tuple[int, int]]:
    """Of the requests whose switch comes when it comes."""
    ranges = {clip.id: outcomes_of(clip) for clip in module.clips if "window" in clip.attrs}
    return {number: (outcomes[0], outcomes[-1]) for number, outcomes in ranges.items() if len(outcomes) > 1}


def round_seconds(module: Module, round: int) -> float | None:
    """How long a round is planned to be; None where nothing is planned again behind it."""
    if not any(cascade.round > round for cascade in module.cascades):
        return None
    return quantity(module.attrs["round"]) / 1e3


def prefixed(store: Any, name: str = "rounds") -> RoundStore:
    """A connection of its own to the store, with keys of its own."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    own = store.clone()
    own.set_timeout(timedelta(seconds=GROUP_TIMEOUT.total_seconds()))
    named: RoundStore = PrefixStore(name, own)
    return named


def all_pairs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Every pair of ranks: the rest of a program may hand over between any two."""
    listed = sorted(ranks)
    return [(one, other) for place, one in enumerate(listed) for other in listed[place + 1 :]]
