"""Discrete events over a lowered program: when every instruction would run, without running it.

Every rank walks its own list. A group's instruction starts when the last of its ranks has come to it, and takes the
``time`` that the plan states where nobody disturbs it: its communication shares links, and on CPUs its computing
shares cores, with whatever else runs (``simulation.network``). A send and a receive are posted and not waited for, a
receive as early as ``receive_prefetch`` says; the transfer runs once both are posted; the first instruction that
reads a received value waits for it, and ``free`` waits for the value's sends. A sum of gradients is posted too, inside
a backward where the program says so; it runs once all its ranks have come to it and the sums of its group before it
are through, and ``step`` waits for it. So does the ``torch_distributed`` back end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

from arachnec.analysis.execution_model import HOST_HANDOFFS
from arachnec.analysis.receive_prefetch import posted_receives
from arachnec.analysis.uses import Values, bucket_of, overlapped_reduces, written
from arachnec.ir.nodes import Cluster, Instruction, quantity
from arachnec.ir.values import Quantity
from arachnec.simulation.network import Activity, Network, Work
from arachnec.simulation.work import Works

COMPUTE = ("encode", "forward", "backward", "weight", "denoise")


@dataclass(frozen=True)
class Interval:
    """One instruction on one rank; ms from the start of the iteration."""

    rank: int
    op: str
    target: str
    start: float
    end: float


@dataclass(frozen=True)
class Transfer:
    """One handoff over the links; ms from the start of the iteration."""

    cascade: str
    source: int
    target: int
    bytes: int
    start: float
    end: float


@dataclass
class _Rank:
    """Where a rank stands."""

    rank: int
    instructions: tuple[Instruction, ...]
    posts: list[tuple[Instruction, ...]]  # the receives to post before each of them; none where that is done
    at: int = 0
    coming: set[str] = field(default_factory=set)  # values that are posted and have not arrived
    leaving: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # sends under way, by value
    waiting_for: str | None = None
    inside: dict[int, list[int]] = field(default_factory=dict)  # the sums that start inside a backward, by number
    posted: set[int] = field(default_factory=set)  # the sums it has come to, by number
    summing: int = 0  # those of them that are not through
    stopped: float | None = None  # since when it stands before a step, waiting for them


@dataclass(frozen=True)
class _Message:
    """A handoff of which at least one side is posted."""

    cascade: str
    size: int  # bytes


@dataclass(frozen=True)
class _Transfer:
    """A handoff on the links."""

    message: _Message
    source: int
    target: int
    start: float


@dataclass(frozen=True)
class _Running:
    """An instruction that takes time, on all ranks of its group."""

    instruction: Instruction
    group: tuple[int, ...]
    start: float
    sums: int = 0  # how many have started inside it


@dataclass(frozen=True)
class _Sum:
    """A sum of gradients that all its ranks have come to."""

    instruction: Instruction
    start: float


@dataclass(frozen=True)
class _Foreseen:
    """The end of an activity, unless its pace has changed since."""

    activity: Activity
    version: int


class Engine:
    """The event loop over a lowered module that ``check`` has passed; after ``run`` it has all intervals and transfers.

    Events are (ms, number, what happens): numbers keep equal times in the order they were made."""

    def __init__(self, values: Values, cluster: Cluster) -> None:
        self._values = values
        self._works = Works(values.module, cluster)
        self._network = Network(self._works.cores)
        posted = posted_receives(values, HOST_HANDOFFS, cluster.memory)
        self._ranks = {
            p.rank: _Rank(p.rank, p.instructions, list(posted[p.rank]), inside=overlapped_reduces(p))
            for p in values.module.programs
        }
        self._events: list[tuple[float, int, _Foreseen | _Transfer]] = []
        self._count = 0
        self._arrived: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self._sums: dict[tuple[int, ...], deque[Instruction]] = defaultdict(deque)  # by group, the first one under way
        self._channels: dict[tuple[int, int], tuple[deque[_Message], deque[_Message]]] = {}
        self.intervals: list[Interval] = []
        self.transfers: list[Transfer] = []

    def run(self) -> None:
        for rank in self._ranks.values():
            self._advance(rank, 0.0)
        self._settle(0.0)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:
                _, _, event = heapq.heappop(self._events)
                if isinstance(event, _Transfer):
                    self._arrive(event, now)
                elif event.version == event.activity.version:
                    self._end(event.activity, now)
            self._settle(now)
        stuck = [rank for rank in self._ranks.values() if rank.at < len(rank.instructions)]
        if stuck:
            places = ", ".join(f"rank {r.rank} in `{written(r.instructions[r.at])}`" for r in stuck[:8])
            raise RuntimeError(f"the program stands still: {places}")

    def _advance(self, rank: _Rank, now: float) -> None:
        """Walk on until something takes time or has to be waited for."""
        while rank.at < len(rank.instructions):
            for receive in rank.posts[rank.at]:
                self._post(receive.peers[0], rank.rank, receive, now, send=False)
            rank.posts[rank.at] = ()
            instruction = rank.instructions[rank.at]
            rank.waiting_for = self._missing(rank, instruction)
            if rank.waiting_for is not None:
                return
            if instruction.op == "send":
                self._post(rank.rank, instruction.peers[0], instruction, now, send=True)
            elif instruction.op == "reduce":
                self._post_sum(rank, rank.at, now)
            elif instruction.op == "step" and rank.summing:
                rank.stopped = now if rank.stopped is None else rank.stopped
                return
            elif instruction.op not in ("receive", "free"):
                self._enter(rank, instruction, now)
                return
            rank.at += 1

    def _missing(self, rank: _Rank, instruction: Instruction) -> str | None:
        """A value that this rank has to wait for before the instruction."""
        if instruction.op == "free" and rank.leaving.get(instruction.target):
            return instruction.target
        if not rank.coming:
            return None
        return next((value for value in self._values.reads(instruction) if value in rank.coming), None)

    def _enter(self, rank: _Rank, instruction: Instruction, now: float) -> None:
        group = instruction.peers or (rank.rank,)
        if len(group) > 1:
            key: tuple[object, ...] = (instruction.op, instruction.target, group)
            here = self._arrived[key]
            here.append(rank.rank)
            if len(here) < len(group):
                return
            del self._arrived[key]
        self._run(_Running(instruction, group, now), now)

    def _run(self, what: _Running, now: float) -> None:
        """The instruction, or its part up to the next sum that starts inside it."""
        instruction, leads = what.instruction, self._leads(what)
        if leads:
            before = leads[what.sums - 1] if what.sums else quantity(instruction.attrs["time"])
            after = leads[what.sums] if what.sums < len(leads) else 0.0
            part = Quantity(max(0.0, before - after), "ms")
            instruction = replace(instruction, attrs=instruction.attrs.updated(time=part))
        self._begin(self._works.of(instruction, what.group[0]), what, now)

    def _leads(self, what: _Running) -> list[float]:
        """How long before its end each of the sums inside it starts; the same on all ranks, as ``check`` has proved."""
        rank = self._ranks[what.group[0]]
        return [quantity(rank.instructions[number].attrs["early"]) for number in rank.inside.get(rank.at, ())]

    def _post_sum(self, rank: _Rank, number: int, now: float) -> None:
        if number in rank.posted:
            return
        rank.posted.add(number)
        rank.summing += 1
        instruction = rank.instructions[number]
        key = ("reduce", instruction.target, instruction.peers, bucket_of(instruction))
        here = self._arrived[key]
        here.append(rank.rank)
        if len(here) < len(instruction.peers):
            return
        del self._arrived[key]
        waiting = self._sums[instruction.peers]
        waiting.append(instruction)
        if len(waiting) == 1:
            self._begin(self._works.of(instruction, rank.rank), _Sum(instruction, now), now)

    def _end_sum(self, what: _Sum, now: float) -> None:
        waiting = self._sums[what.instruction.peers]
        waiting.popleft()
        if waiting:
            self._begin(self._works.of(waiting[0], waiting[0].peers[0]), _Sum(waiting[0], now), now)
        for rank in (self._ranks[member] for member in what.instruction.peers):
            rank.summing -= 1
            if rank.stopped is None:  # hidden behind what the rank does
                continue
            start = max(what.start, rank.stopped)
            self.intervals.append(Interval(rank.rank, "reduce", what.instruction.target, start, now))
            if not rank.summing:
                rank.stopped = None
                self._advance(rank, now)

    def _begin(self, work: Work, what: _Running | _Sum | _Transfer, now: float) -> None:
        activity = Activity(work, what, now)
        if work.shares:
            self._network.start(activity)
        else:
            activity.takes = work.alone
            self._foresee(activity)

    def _settle(self, now: float) -> None:
        for activity in self._network.settle(now):
            self._foresee(activity)

    def _foresee(self, activity: Activity) -> None:
        self._push(activity.end, _Foreseen(activity, activity.version))

    def _end(self, activity: Activity, now: float) -> None:
        if activity.work.shares:
            self._network.finish(activity)
        what = activity.what
        if isinstance(what, _Transfer):
            latency = self._works.route(what.source, what.target).latency
            self._push(now + latency, what)
            return
        if isinstance(what, _Sum):
            self._end_sum(what, now)
            return
        assert isinstance(what, _Running)
        if what.sums < len(self._leads(what)):
            for rank in (self._ranks[member] for member in what.group):
                self._post_sum(rank, rank.inside[rank.at][what.sums], now)
            self._run(replace(what, sums=what.sums + 1), now)
            return
        for member in what.group:
            self.intervals.append(Interval(member, what.instruction.op, what.instruction.target, what.start, now))
            self._ranks[member].at += 1
        for member in what.group:
            self._advance(self._ranks[member], now)

    def _post(self, source: int, target: int, instruction: Instruction, now: float, *, send: bool) -> None:
        """The n-th send of a pair of ranks meets its n-th receive."""
        sends, receives = self._channels.setdefault((source, target), (deque(), deque()))
        mine, other = (sends, receives) if send else (receives, sends)
        size = instruction.attrs.get("bytes", 0)
        message = _Message(instruction.target, size if isinstance(size, int) else 0)
        if send:
            self._ranks[source].leaving[message.cascade] += 1
        else:
            self._ranks[target].coming.add(message.cascade)
        if not other:
            mine.append(message)
            return
        other.popleft()
        self._start(message, source, target, now)

    def _start(self, message: _Message, source: int, target: int, now: float) -> None:
        work = self._works.transfer(source, target, message.size)
        self._begin(work, _Transfer(message, source, target, now), now)

    def _arrive(self, transfer: _Transfer, now: float) -> None:
        source, target, message = self._ranks[transfer.source], self._ranks[transfer.target], transfer.message
        name = message.cascade
        self.transfers.append(Transfer(name, source.rank, target.rank, message.size, transfer.start, now))
        source.leaving[name] -= 1
        target.coming.discard(name)
        for rank in (source, target):
            if rank.waiting_for == name:
                self._advance(rank, now)

    def _push(self, when: float, event: _Foreseen | _Transfer) -> None:
        heapq.heappush(self._events, (when, self._count, event))
        self._count += 1
