"""Hosts, device streams and what waits for what: NCCL's semantics without NCCL.

Every host issues its operations in order. A device runs each of its streams in order; streams share a queue where there
are more of them than the pool has. A kernel that meets other ranks is done once its counterpart is at the head of its
queue on every member; until then it spins. Nothing takes time, so a machine either finishes or stands still, whatever
order its hosts run in.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

COMPUTE = "compute"


@dataclass(frozen=True)
class Launch:
    """A kernel on a stream, which is named for its communicator. With ``meeting`` it waits for its members' kernels."""

    text: str
    stream: Hashable = COMPUTE
    meeting: Hashable = None
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Fence:
    """``stream`` goes on once what has been launched on ``until`` so far is done; the host goes on at once."""

    text: str
    stream: Hashable
    until: Hashable


@dataclass(frozen=True)
class Synchronize:
    """The host waits until its device is idle."""

    text: str


@dataclass(frozen=True)
class Post:
    """The host is ready to receive a message over its own network."""

    text: str
    message: Hashable


@dataclass(frozen=True)
class Send:
    """A message leaves over the host's network once what is on ``stream`` so far, the copy to the host, is done."""

    text: str
    message: Hashable
    stream: Hashable


@dataclass(frozen=True)
class Await:
    """The host waits until a message is through: sent by one rank, posted by the other."""

    text: str
    message: Hashable


@dataclass(frozen=True)
class Connect:
    """The host waits until all members call this."""

    text: str
    connection: Hashable
    members: tuple[int, ...]


Action: TypeAlias = Launch | Fence | Synchronize | Post | Send | Await | Connect


@dataclass(eq=False)
class _Work:
    """Something on a stream."""

    action: Launch | Fence | Send
    rank: int
    queue: tuple[int, int]
    after: _Work | None = None  # what a fence waits for
    done: bool = False


@dataclass(frozen=True)
class Standstill:
    """Who waits for what: a circle, or a chain that ends at something that never comes."""

    lines: tuple[str, ...]
    is_circle: bool

    def __str__(self) -> str:
        return "\n".join(self.lines)


Waiter: TypeAlias = tuple[str, object]  # ("host", rank) or ("queue", (rank, number))


@dataclass
class Machine:
    """``run`` executes every rank's actions; ``pool`` is how many streams a device has beside the compute stream.

    ``waits`` is the probability of a wait for the whole device before any action of a host; 1 puts one before all.
    """

    actions: Mapping[int, Sequence[Action]]
    pool: int
    waits: float
    rng: random.Random
    _at: dict[int, int] = field(default_factory=dict)
    _synchronized: dict[int, int] = field(default_factory=dict)  # up to which action the injected wait is over
    _queues: dict[tuple[int, int], deque[_Work]] = field(default_factory=lambda: defaultdict(deque))
    _streams: dict[tuple[int, Hashable], tuple[int, int]] = field(default_factory=dict)
    _last: dict[tuple[int, Hashable], _Work] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # works not done, by rank
    _heads: dict[Hashable, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    _called: dict[Hashable, set[int]] = field(default_factory=lambda: defaultdict(set))
    _half: dict[Hashable, set[str]] = field(default_factory=lambda: defaultdict(set))  # "sent", "posted"
    _waiters: dict[Hashable, list[Waiter]] = field(default_factory=lambda: defaultdict(list))
    _runnable: list[int] = field(default_factory=list)

    def run(self) -> Standstill | None:
        """None where every host comes to its end and every device is idle."""
        self._at = dict.fromkeys(self.actions, 0)
        self._synchronized = dict.fromkeys(self.actions, -1)
        self._runnable = list(self.actions)
        while self._runnable:
            chosen = self.rng.randrange(len(self._runnable))
            self._runnable[chosen], self._runnable[-1] = self._runnable[-1], self._runnable[chosen]
            self._go_on(self._runnable.pop())
        if all(self._at[rank] == len(own) for rank, own in self.actions.items()) and not any(self._open.values()):
            return None
        return self._explain()

    def _go_on(self, rank: int) -> None:
        """Let a host run until it has to wait, or for a few actions."""
        actions = self.actions[rank]
        for _ in range(self.rng.randint(1, 8)):
            at = self._at[rank]
            if at == len(actions):
                return
            if self._synchronized[rank] < at:
                if self.rng.random() < self.waits and self._open[rank]:
                    self._waiters["idle", rank].append(("host", rank))
                    self._synchronized[rank] = at
                    return
                self._synchronized[rank] = at
            if not self._act(rank, actions[at]):
                return
            self._at[rank] += 1
        self._runnable.append(rank)

    def _act(self, rank: int, action: Action) -> bool:
        """Whether the host may go on; if not it is among the waiters of what it waits for."""
        match action:
            case Launch() | Send():
                self._put(_Work(action, rank, self._queue(rank, action.stream)), action.stream)
            case Fence():
                last = self._last.get((rank, action.until))
                if last is not None and not last.done:
                    self._put(_Work(action, rank, self._queue(rank, action.stream), last), action.stream)
            case Synchronize():
                return self._is_true(not self._open[rank], ("idle", rank), rank)
            case Post():
                self._half[action.message].add("posted")
                self._wake(("message", action.message))
            case Await():
                through = len(self._half[action.message]) == 2
                return self._is_true(through, ("message", action.message), rank)
            case Connect():
                called = self._called[action.connection]
                called.add(rank)
                if len(called) < len(action.members):
                    return self._is_true(False, ("connection", action.connection), rank)
                self._wake(("connection", action.connection))
        return True

    def _is_true(self, condition: bool, what: Hashable, rank: int) -> bool:
        if not condition:
            self._waiters[what].append(("host", rank))
        return condition

    def _queue(self, rank: int, stream: Hashable) -> tuple[int, int]:
        """The compute stream has one of its own; the others take those of the pool in turn, in order of first use."""
        if (rank, stream) not in self._streams:
            others = sum(1 for of, name in self._streams if of == rank and name != COMPUTE)
            self._streams[rank, stream] = (rank, 0 if stream == COMPUTE else 1 + others % self.pool)
        return self._streams[rank, stream]

    def _put(self, work: _Work, stream: Hashable) -> None:
        self._queues[work.queue].append(work)
        self._last[work.rank, stream] = work
        self._open[work.rank] += 1
        if len(self._queues[work.queue]) == 1:
            self._drain(work.queue)

    def _drain(self, first: tuple[int, int]) -> None:
        """Finish what can be finished, from the head of this queue on and wherever that lets others go on."""
        todo = [first]
        while todo:
            queue = self._queues[todo.pop()]
            if not queue:
                continue
            work = queue[0]
            if work.after is not None and not work.after.done:
                self._waiters[work.after].append(("queue", work.queue))
                continue
            finished = [work.queue]
            if isinstance(work.action, Launch) and work.action.meeting is not None:
                heads = self._heads[work.action.meeting]
                heads.add(work.queue)
                if len(heads) < len(work.action.members):
                    continue
                finished = list(heads)
            for place in finished:
                done = self._queues[place].popleft()
                todo += [place, *self._finish(done)]

    def _finish(self, work: _Work) -> Iterator[tuple[int, int]]:
        """Wakes the hosts that waited for this; gives the queues that did."""
        work.done = True
        self._open[work.rank] -= 1
        if not self._open[work.rank]:
            self._wake(("idle", work.rank))
        if isinstance(work.action, Send):
            self._half[work.action.message].add("sent")
            self._wake(("message", work.action.message))
        yield from (place for _, place in self._waiters.pop(work, []))  # type: ignore[misc]

    def _wake(self, what: Hashable) -> None:
        self._runnable += [rank for _, rank in self._waiters.pop(what, [])]  # type: ignore[misc]

    def _explain(self) -> Standstill:
        """Follow who waits for what until something comes up twice."""
        start: Waiter = next(("host", r) for r, own in self.actions.items() if self._at[r] < len(own) or self._open[r])
        chain: list[Waiter] = [start]
        lines: list[str] = []
        while True:
            line, following = self._why(chain[-1])
            lines.append(line)
            if following is None:
                return Standstill(tuple(lines), False)
            if following in chain:
                return Standstill(tuple(lines[chain.index(following) :]), True)
            chain.append(following)

    def _why(self, waiter: Waiter) -> tuple[str, Waiter | None]:
        """What a host or a queue waits for, in words, and who has that."""
        kind, place = waiter
        if kind == "host":
            return self._why_host(place)  # type: ignore[arg-type]
        return self._why_queue(place)  # type: ignore[arg-type]

    def _why_host(self, rank: int) -> tuple[str, Waiter | None]:
        if self._at[rank] == len(self.actions[rank]):
            busy = self._busy(rank)
            return f"rank {rank}: its host has ended" + ("" if busy else ", and what is waited for never comes"), busy
        action = self.actions[rank][self._at[rank]]
        if ("host", rank) in self._waiters.get(("idle", rank), []):
            return f"rank {rank}: its host waits for the whole device before {action.text}", self._busy(rank)
        if isinstance(action, Connect):
            absent = next(m for m in action.members if m not in self._called[action.connection])
            return f"rank {rank}: its host connects for {action.text}, which rank {absent} has not called", (
                "host",
                absent,
            )
        assert isinstance(action, Await)
        missing = "posted" if "sent" in self._half[action.message] else "sent"
        other = self._other_side(action.message, missing)
        return f"rank {rank}: its host waits for {action.text}, which is not {missing}", other

    def _other_side(self, message: Hashable, missing: str) -> Waiter | None:
        kind = Post if missing == "posted" else Send
        for rank, own in self.actions.items():
            for number, action in enumerate(own):
                if isinstance(action, kind) and action.message == message:
                    if number >= self._at[rank]:
                        return "host", rank
                    return "queue", self._streams[rank, action.stream]  # type: ignore[union-attr]
        return None

    def _busy(self, rank: int) -> Waiter | None:
        return next((("queue", place) for place, queue in self._queues.items() if place[0] == rank and queue), None)

    def _why_queue(self, place: tuple[int, int]) -> tuple[str, Waiter | None]:
        rank, number = place
        work = self._queues[place][0]
        name = f"rank {rank}: {'the compute stream' if number == 0 else f'stream {number}'}"
        if work.after is not None:
            return f"{name} waits before {work.action.text} for {work.after.action.text}", ("queue", work.after.queue)
        assert isinstance(work.action, Launch)
        present = {of for of, _ in self._heads[work.action.meeting]}
        absent = next(member for member in work.action.members if member not in present)
        line = f"{name} runs {work.action.text}, which rank {absent} has not started"
        for queue, works in self._queues.items():
            for other in works if queue[0] == absent else ():
                if isinstance(other.action, Launch) and other.action.meeting == work.action.meeting:
                    return line, ("queue", queue)
        return line, ("host", absent)
