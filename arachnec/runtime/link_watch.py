"""How fast links between stages are while a run goes on, and when plans are made for what was measured.

Every rank notes when it begins to send a message and when one has arrived. Clocks of two ranks differ by a constant;
there and back together it cancels, so a link counts as equally fast both ways. Of the largest messages the one that
travelled least counts, because the others may have stood in a queue. All ranks see all notes, and decide the same.

Always true: between two changes of plans lie ``EVERY`` steps at least; without messages both ways nothing changes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from arachnec.runtime.handoffs import Received

EVERY = 4  # steps
WORTH = 1.5  # a link's speed over the planned one, or under it, from which plans are made anew

Pair = tuple[int, int]
Speeds = dict[Pair, float]  # GB/s between two ranks, the lower first


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One end of a message, as its rank saw it: ``at`` in seconds of that rank's clock."""

    cascade: str
    peer: int
    size: int  # bytes
    at: float


class Notes(msgspec.Struct, frozen=True):
    """Of one rank and step."""

    sent: list[Message]
    arrived: list[Message]


class HandoffNotes:
    """What a rank notes of its messages. A thread for each peer waits for what comes from it."""

    def __init__(self) -> None:
        self._sent: list[Message] = []
        self._coming: list[Future[Message]] = []
        self._waiting: defaultdict[int, ThreadPoolExecutor] = defaultdict(lambda: ThreadPoolExecutor(1, "arrivals"))

    def sends(self, cascade: str, peer: int, size: int) -> None:
        """A message begins to travel now."""
        self._sent.append(Message(cascade, peer, size, time.perf_counter()))

    def expects(self, coming: Received) -> None:
        """A message's receive was started."""
        self._coming.append(self._waiting[coming.source].submit(_arrival, coming))

    def take(self) -> Notes:
        """All since the last time, once everything has arrived."""
        notes = Notes(self._sent, [future.result() for future in self._coming])
        self._sent, self._coming = [], []
        return notes

    def close(self) -> None:
        for thread in self._waiting.values():
            thread.shutdown(wait=False, cancel_futures=True)


def _arrival(coming: Received) -> Message:
    coming.wait()
    return Message(coming.cascade, coming.source, coming.buffer.nbytes, time.perf_counter())


def measured_speeds(notes: Sequence[Notes]) -> Speeds:
    """GB/s between every two ranks that sent to each other both ways, by the notes of all ranks."""
    sent = {(m.cascade, rank, m.peer): m for rank, own in enumerate(notes) for m in own.sent}
    travelled: dict[Pair, dict[int, float]] = defaultdict(dict)  # (from, to): the least time by size
    for rank, own in enumerate(notes):
        for message in own.arrived:
            begun = sent.get((message.cascade, message.peer, rank))
            if begun is not None:
                least = travelled[message.peer, rank]
                least[message.size] = min(least.get(message.size, float("inf")), message.at - begun.at)
    speeds: Speeds = {}
    for (a, b), there in travelled.items():
        back = travelled.get((b, a))
        if a < b and back:
            size, returned = max(there), max(back)
            both = there[size] + back[returned]
            if both > 0:
                speeds[a, b] = (size + returned) / both / 1e9
    return speeds


@dataclass(frozen=True)
class LinkWatch:
    """``planned``: the speeds of the latest plans, those of the cluster's file at first; ``changed``: since which step.

    The first step of a run makes connections and compiles, so nothing is concluded from it.
    """

    planned: Mapping[Pair, float] = field(default_factory=dict)
    changed: int = 0

    def due(self, step: int) -> bool:
        """Whether plans may change behind this step: only then notes are compared."""
        return step - self.changed >= EVERY

    def after(self, step: int, measured: Speeds) -> LinkWatch:
        """What plans are to be made for from now on: this itself where no link's speed has changed enough."""
        known = {pair: self.planned[pair] for pair in measured if pair in self.planned}
        differs = [max(measured[pair] / speed, speed / measured[pair]) for pair, speed in known.items()]
        if len(known) == len(measured) and max(differs, default=1.0) < WORTH:
            return self
        return replace(self, planned={**self.planned, **measured}, changed=step)
