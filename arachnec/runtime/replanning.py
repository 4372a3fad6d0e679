"""When plans are made anew in a run: for links as measured, and for ranks that compute more slowly than others.

Every rank notes when it begins to send a message and when one has arrived. Clocks of two ranks differ by a constant;
there and back together it cancels, so a link counts as equally fast both ways. Of the largest messages the one that
travelled least counts, because the others may have stood in a queue. All ranks see all notes, and decide the same.

Always true: between two changes of plans lie ``EVERY`` steps at least; without messages both ways nothing changes.

A rank's slowdown is its measured over its planned computing, divided by the median of the other ranks; times what it
was planned with, where that is more than 1. Where all ranks share every cascade none stands out: those that wait for
the slow one wait inside the cascade. A slowdown that lasts becomes a fact of the cluster, and the plans behind it give
the rank less work; one that is over is forgotten.

Always true: a change of plans needs ``STEPS`` steps that agree. Every change of one rank doubles the steps that its
next one needs, so a rank that is slow by turns does not have plans follow it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median

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


SLOW = 2.0  # a slowdown from which a rank counts as slow
OTHERWISE = 1.5  # how far a slow rank may be off what it is planned with
STEPS = 4  # that a slowdown must last
MOST_STEPS = 512
IDLE = 16  # times as many steps without work until a slow rank is tried again
LEAST_MS = 50.0  # of computing in a step: below, the system's own noise is as large


@dataclass(frozen=True)
class Seen:
    """Of one rank: its latest slowdowns in a row that say the same, how many steps it was idle, and how many steps its
    next change of plans needs."""

    slowdowns: tuple[float, ...] = ()
    idle: int = 0
    needed: int = STEPS


@dataclass(frozen=True)
class SlowRanks:
    """``planned``: the slowdowns that plans are made with from now on, by rank."""

    planned: Mapping[int, float] = field(default_factory=dict)
    seen: Mapping[int, Seen] = field(default_factory=dict)

    def after(
        self, planned: Sequence[float], measured: Sequence[float], counted: Mapping[int, float] | None = None
    ) -> SlowRanks:
        """With one more step, of which each rank's computing was so long; ``counted`` are the slowdowns that the step
        was planned with."""
        counted = counted or {}
        known = factors([ms / counted.get(rank, 1.0) for rank, ms in enumerate(planned)], measured)
        known |= {rank: counted[rank] * ms for rank, ms in factors(planned, measured).items() if rank in counted}
        following, seen = dict(self.planned), dict(self.seen)
        for rank, ms in enumerate(measured):
            now = self.planned.get(rank, 1.0)
            before = self.seen.get(rank, Seen())
            slowdown = known.get(rank)
            if slowdown is not None and slowdown > now and ms < LEAST_MS:
                slowdown = None  # of little work most is launching it
            own = _seen(before, now, slowdown, works=planned[rank] > 0)
            if len(own.slowdowns) >= own.needed:
                following[rank] = median(own.slowdowns[-STEPS:])
            if own.idle >= IDLE * own.needed and now > 1.0:  # nobody knows, so it is tried
                following[rank] = 1.0
            if following.get(rank, 1.0) < SLOW:
                following.pop(rank, None)
            if following.get(rank, 1.0) != now:
                own = Seen(needed=min(MOST_STEPS, 2 * own.needed))
            seen[rank] = own
        return replace(self, planned=following, seen=seen)


def _seen(before: Seen, now: float, slowdown: float | None, *, works: bool) -> Seen:
    """With one more step of a rank that is planned with the slowdown ``now``."""
    idle = 0 if works else before.idle + 1
    if slowdown is None:
        return replace(before, slowdowns=before.slowdowns if not works else (), idle=idle)
    becomes_slow = now < SLOW <= slowdown
    otherwise = now >= SLOW and max(slowdown / now, now / slowdown) >= OTHERWISE
    changes = becomes_slow or otherwise
    return replace(before, slowdowns=(*before.slowdowns, slowdown) if changes else (), idle=idle)


def factors(planned: Sequence[float], measured: Sequence[float]) -> dict[int, float]:
    """How much slower than the others each rank was, of those that had something to compute."""
    ratios = {
        rank: ms / expected
        for rank, (ms, expected) in enumerate(zip(measured, planned, strict=True))
        if ms > 0 and expected > 0
    }
    slower = {}
    for rank, ratio in ratios.items():
        others = [other for number, other in ratios.items() if number != rank]
        if others:
            slower[rank] = ratio / median(others)
    return slower


def notes_of_slow(before: Mapping[int, float], now: Mapping[int, float], step: int) -> list[str]:
    """What a person should know where plans change with ``step``."""
    slow = [
        f"rank {rank} computes {now[rank]:.1f} times as slowly as the others: from step {step} on it gets less work, "
        "where the plan's pipeline can give it less; see to its host and device"
        for rank in sorted(now)
        if now[rank] != before.get(rank)
    ]
    over = [f"rank {rank} is planned like the others again from step {step} on" for rank in sorted({*before} - {*now})]
    return slow + over
