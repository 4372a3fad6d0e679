"""What the communicators of one process share: settings, counts, places for kernels, and a watch for standstills."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist


class Standstill(RuntimeError):
    """No rank can go on; the message is the circle."""


@dataclass(frozen=True)
class Settings:
    """How the group behaves; the same on every rank. Times in seconds."""

    eager: bool = True  # communicators connect when they are made, as with `device_id`
    kernels: int = 32  # operations that may be pending on one rank
    patience: float = 2.0
    delay: float = 0.0  # that every operation takes on the device, so that the host runs ahead of it


@dataclass
class Counts:
    """What one rank did, since ``install``."""

    communicators: int = 0
    pairs: int = 0  # communicators of two that a send or receive outside a batch made
    operations: int = 0
    host_waits: int = 0  # waits for a work that had not ended: on a GPU a stream waits, and the host goes on
    connected_in_use: int = 0  # communicators that connected at their first operation
    freed_in_flight: list[str] = field(default_factory=list)
    written_in_flight: list[str] = field(default_factory=list)


class Places:
    """Places for kernels, given out in the order they were asked for."""

    def __init__(self, count: int) -> None:
        self._free, self._turn, self._next = count, 0, itertools.count()
        self._changed = threading.Condition()

    def ticket(self) -> int:
        return next(self._next)

    def take(self, ticket: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == ticket and self._free > 0)
            self._turn, self._free = self._turn + 1, self._free - 1
            self._changed.notify_all()

    def give_back(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class Watch:
    """Tells all ranks where this one stands, and finds out that none moves any more."""

    def __init__(self, store: dist.Store, rank: int, world: int, patience: float) -> None:
        self._store, self._rank, self._world, self._patience = store, rank, world, patience
        self._lock = threading.Lock()
        self._heads: dict[object, tuple[str, Callable[[], list[int]]]] = {}
        self._moved = time.monotonic()
        self._changes = 0
        self.error: str | None = None
        self.ended = False
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def at(self, what: str, waits_for: Callable[[], list[int]]) -> Iterator[None]:
        """Inside, this rank's ``what`` waits for these ranks to do the same."""
        own = object()  # two communicators of the same ranks may do the same at once
        with self._lock:
            self._heads[own] = what, waits_for
            self._step()
        try:
            yield
        finally:
            with self._lock:
                del self._heads[own]
                self._step()

    def moved(self) -> None:
        with self._lock:
            self._step()

    def _step(self) -> None:
        self._moved = time.monotonic()
        self._changes += 1

    def check(self) -> None:
        if self.error is not None:
            raise Standstill(self.error)

    def _run(self) -> None:
        while not self.ended and self.error is None:
            time.sleep(self._patience / 8)
            with self._lock:
                heads = [(what, waits_for()) for what, waits_for in self._heads.values()]
                still = bool(heads) and time.monotonic() - self._moved > self._patience
                state = {"still": still, "changes": self._changes, "heads": heads}
            try:
                self._store.set(f"state/{self._rank}", json.dumps(state))
                if still:
                    self._judge()
            except RuntimeError:  # the store is gone: the run is over
                return

    def _judge(self) -> None:
        """All that this rank waits for, and all that those wait for, stands still: nobody will ever move."""
        states: dict[int, dict[str, Any]] = {}
        pending = [self._rank]
        while pending:
            rank = pending.pop()
            if rank in states:
                continue
            if not self._store.check([f"state/{rank}"]):
                return
            states[rank] = json.loads(self._store.get(f"state/{rank}"))
            if not states[rank]["still"]:
                return
            pending += [other for _, ranks in states[rank]["heads"] for other in ranks]
        lines = [
            f"rank {rank} in {what} waits for {', '.join(f'rank {other}' for other in ranks) or 'its own device'}"
            for rank, state in sorted(states.items())
            for what, ranks in state["heads"]
        ]
        self.error = "nothing moves any more:\n" + "\n".join(lines)


@dataclass(frozen=True)
class Device:
    """What the communicators of one process share."""

    settings: Settings
    counts: Counts
    kernels: Places
    watch: Watch
