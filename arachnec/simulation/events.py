"""Discrete-event simulation of a lowered program. In: a module that ``check`` has passed. Out: intervals and transfers.

Every rank walks its own list. A collective instruction starts when the last rank of its group reaches it. Alone it
takes the ``time`` that the plan states; beside others its communication shares links, and on CPUs its computation
shares cores (``simulation.network``).

Updated parameters are gathered layer by layer while the rank goes on; a forward waits before each of its layers for
that layer alone.

Sends, receives and all-reduces are asynchronous, as in the ``torch_distributed`` back end. A receive starts as early
as ``receive_prefetch`` says. A transfer runs once both sides have started it. The first instruction that reads a
received value waits for it; ``free`` waits for the value's sends. An all-reduce runs once all its ranks have started
it, inside a backward where the program says so, and the earlier ones of its group are complete; ``norm`` and ``step``
wait for it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace

from arachnec.analysis.communicators import HOST_HANDOFFS
from arachnec.analysis.receive_prefetch import prefetched_receives
from arachnec.analysis.uses import COMPUTE, READS_GRADIENTS, Values, moved_by, overlapped_reduces, written
from arachnec.ir.nodes import Cluster, Instruction, quantity
from arachnec.ir.sampling import arrivals
from arachnec.ir.values import Quantity
from arachnec.simulation.network import Activity, Network, Work
from arachnec.simulation.updated_layers import UpdatedLayers
from arachnec.simulation.work import Works


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
    """The state of a rank."""

    rank: int
    instructions: tuple[Instruction, ...]
    prefetched: list[tuple[Instruction, ...]]  # receives to start before each instruction; emptied once started
    at: int = 0
    receiving: Counter[str] = field(default_factory=Counter)  # receives that have started and not completed, by value
    sending: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # incomplete sends, by value
    waiting_for: str | None = None
    overlapped: dict[int, list[int]] = field(default_factory=dict)  # reduces that start inside a backward, by index
    started: set[int] = field(default_factory=set)  # reduces that it has started, by index
    reducing: int = 0  # how many of them are not complete
    stopped: float | None = None  # since when it waits for them before a norm or step


@dataclass(frozen=True)
class _Message:
    """A handoff that at least one side has started."""

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
    reduces: int = 0  # how many have started inside it
    layers: int | None = None  # of a forward whose parameters are on their way, how many have run


@dataclass(frozen=True)
class _AllReduce:
    """An all-reduce, or the gather of a layer, that all its ranks have started."""

    instruction: Instruction
    start: float


@dataclass(frozen=True)
class _Completion:
    """The end of an activity, unless its pace has changed since."""

    activity: Activity
    version: int


@dataclass(frozen=True)
class _Arrived:
    """A request is there that a rank waits for."""

    rank: int


class Engine:
    """The event loop; after ``run`` it holds all intervals and transfers.

    Events are (ms, number, event): the number keeps events of equal times in the order they were pushed.
    """

    def __init__(self, values: Values, cluster: Cluster) -> None:
        self._values = values
        self._works = Works(values.module, cluster)
        self._network = Network(self._works.cores)
        prefetched = prefetched_receives(values, HOST_HANDOFFS, cluster.memory)
        self._ranks = {
            p.rank: _Rank(p.rank, p.instructions, list(prefetched[p.rank]), overlapped=overlapped_reduces(p))
            for p in values.module.programs
        }
        self._arrivals = arrivals(values.module.clips, values.module.cascades)
        self._events: list[tuple[float, int, _Completion | _Transfer | _Arrived]] = []
        self._count = 0
        self._arrived: dict[tuple[object, ...], list[int]] = defaultdict(list)
        self._reduces: dict[tuple[int, ...], deque[Instruction]] = defaultdict(deque)  # by group; the first one runs
        self._updated = UpdatedLayers(values)
        self._waiting: dict[tuple[str, int], list[_Running]] = defaultdict(list)  # forwards, by the layer they wait for
        self._unmatched: dict[
            tuple[int, int], tuple[deque[_Message], deque[_Message]]
        ] = {}  # sends, receives of a pair
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
                elif isinstance(event, _Arrived):
                    self._advance(self._ranks[event.rank], now)
                elif event.version == event.activity.version:
                    self._end(event.activity, now)
            self._settle(now)
        stuck = [rank for rank in self._ranks.values() if rank.at < len(rank.instructions)]
        if stuck:
            places = ", ".join(f"rank {r.rank} in `{written(r.instructions[r.at])}`" for r in stuck[:8])
            raise RuntimeError(f"the program stands still: {places}")

    def _advance(self, rank: _Rank, now: float) -> None:
        """Walk on until an instruction takes time or has to wait."""
        while rank.at < len(rank.instructions):
            for receive in rank.prefetched[rank.at]:
                self._start_handoff(receive.peers[0], rank.rank, receive, now, send=False)
            rank.prefetched[rank.at] = ()
            instruction = rank.instructions[rank.at]
            rank.waiting_for = self._missing(rank, instruction)
            if rank.waiting_for is not None:
                return
            if instruction.op == "send":
                self._start_handoff(rank.rank, instruction.peers[0], instruction, now, send=True)
            elif instruction.op in ("gather", "reduce"):
                self._start_reduce(rank, rank.at, now)
            elif instruction.op in READS_GRADIENTS and rank.reducing:
                rank.stopped = now if rank.stopped is None else rank.stopped
                return
            elif self._arrivals.get(instruction.target, 0.0) > now and instruction.op in COMPUTE:
                self._push(self._arrivals[instruction.target], _Arrived(rank.rank))
                return
            elif instruction.op not in ("receive", "free", "replan"):
                self._enter(rank, instruction, now)
                return
            rank.at += 1

    def _missing(self, rank: _Rank, instruction: Instruction) -> str | None:
        """A value that this rank has to wait for before the instruction."""
        if instruction.op == "free" and rank.sending.get(instruction.target):
            return instruction.target
        if not rank.receiving:
            return None
        return next((value for value in self._values.reads(instruction) if value in rank.receiving), None)

    def _enter(self, rank: _Rank, instruction: Instruction, now: float) -> None:
        group = instruction.peers or (rank.rank,)
        if len(group) > 1:
            key: tuple[object, ...] = (instruction.op, instruction.target, group)
            arrived = self._arrived[key]
            arrived.append(rank.rank)
            if len(arrived) < len(group):
                return
            del self._arrived[key]
        self._run(_Running(instruction, group, now), now)

    def _run(self, running: _Running, now: float) -> None:
        """The instruction, or its part up to the next reduce that starts inside it, or the next layer to wait for."""
        instruction, leads = running.instruction, self._leads(running)
        if instruction.op == "forward":
            done = running.layers or 0
            if (missing := self._updated.missing(instruction, done)) is not None:
                self._waiting[missing].append(running)
                return
            until = self._updated.reaches(instruction, done)
            if running.layers is not None or not self._updated.is_over(instruction, until):
                instruction = self._updated.part(instruction, done, until)
                running = replace(running, layers=until)
        if leads:
            before = leads[running.reduces - 1] if running.reduces else quantity(instruction.attrs["time"])
            after = leads[running.reduces] if running.reduces < len(leads) else 0.0
            part = Quantity(max(0.0, before - after), "ms")
            instruction = replace(instruction, attrs=instruction.attrs.updated(time=part))
        self._begin(self._works.of(instruction, running.group[0]), running, now)

    def _leads(self, running: _Running) -> list[float]:
        """How long before its end each reduce inside it starts, ms; ``check`` has proved that all ranks agree."""
        rank = self._ranks[running.group[0]]
        return [quantity(rank.instructions[number].attrs["early"]) for number in rank.overlapped.get(rank.at, ())]

    def _start_reduce(self, rank: _Rank, number: int, now: float) -> None:
        if number in rank.started:
            return
        rank.started.add(number)
        instruction = rank.instructions[number]
        parts = self._updated.parts(instruction) if instruction.op == "gather" else (instruction,)
        rank.reducing += len(parts)
        key = (instruction.op, instruction.target, instruction.peers, moved_by(instruction))
        arrived = self._arrived[key]
        arrived.append(rank.rank)
        if len(arrived) < len(instruction.peers):
            return
        del self._arrived[key]
        queue = self._reduces[instruction.peers]
        queue.extend(parts)
        if len(queue) == len(parts):
            self._begin(self._works.of(queue[0], rank.rank), _AllReduce(queue[0], now), now)

    def _end_reduce(self, reduce: _AllReduce, now: float) -> None:
        queue = self._reduces[reduce.instruction.peers]
        queue.popleft()
        if queue:
            self._begin(self._works.of(queue[0], queue[0].peers[0]), _AllReduce(queue[0], now), now)
        if reduce.instruction.op == "gather":
            for running in self._waiting.pop(self._updated.arrived(reduce.instruction), ()):
                self._run(running, now)
        for rank in (self._ranks[member] for member in reduce.instruction.peers):
            rank.reducing -= 1
            if rank.stopped is None:  # it overlaps what the rank does
                continue
            start = max(reduce.start, rank.stopped)
            self.intervals.append(Interval(rank.rank, "reduce", reduce.instruction.target, start, now))
            if not rank.reducing:
                rank.stopped = None
                self._advance(rank, now)

    def _begin(self, work: Work, subject: _Running | _AllReduce | _Transfer, now: float) -> None:
        activity = Activity(work, subject, now)
        if work.shares:
            self._network.start(activity)
        else:
            activity.takes = work.alone
            self._push_completion(activity)

    def _settle(self, now: float) -> None:
        for activity in self._network.settle(now):
            self._push_completion(activity)

    def _push_completion(self, activity: Activity) -> None:
        self._push(activity.end, _Completion(activity, activity.version))

    def _end(self, activity: Activity, now: float) -> None:
        if activity.work.shares:
            self._network.finish(activity)
        subject = activity.subject
        if isinstance(subject, _Transfer):
            latency = self._works.handoff_route(subject.source, subject.target).latency
            self._push(now + latency, subject)
            return
        if isinstance(subject, _AllReduce):
            self._end_reduce(subject, now)
            return
        assert isinstance(subject, _Running)
        if subject.reduces < len(self._leads(subject)):
            for rank in (self._ranks[member] for member in subject.group):
                self._start_reduce(rank, rank.overlapped[rank.at][subject.reduces], now)
            self._run(replace(subject, reduces=subject.reduces + 1), now)
            return
        instruction = subject.instruction
        if subject.layers is not None and not self._updated.is_over(instruction, subject.layers):
            self._run(subject, now)
            return
        for member in subject.group:
            self.intervals.append(Interval(member, instruction.op, instruction.target, subject.start, now))
            self._ranks[member].at += 1
        for member in subject.group:
            self._advance(self._ranks[member], now)

    def _start_handoff(self, source: int, target: int, instruction: Instruction, now: float, *, send: bool) -> None:
        """One side of a handoff. The n-th send of a pair of ranks is matched with its n-th receive."""
        sends, receives = self._unmatched.setdefault((source, target), (deque(), deque()))
        own, opposite = (sends, receives) if send else (receives, sends)
        size = instruction.attrs.get("bytes", 0)
        message = _Message(instruction.target, size if isinstance(size, int) else 0)
        if send:
            self._ranks[source].sending[message.cascade] += 1
        else:
            self._ranks[target].receiving[message.cascade] += 1
        if not opposite:
            own.append(message)
            return
        opposite.popleft()
        work = self._works.transfer(source, target, message.size)
        self._begin(work, _Transfer(message, source, target, now), now)

    def _arrive(self, transfer: _Transfer, now: float) -> None:
        source, target, message = self._ranks[transfer.source], self._ranks[transfer.target], transfer.message
        name = message.cascade
        self.transfers.append(Transfer(name, source.rank, target.rank, message.size, transfer.start, now))
        source.sending[name] -= 1
        target.receiving[name] -= 1
        if not target.receiving[name]:
            del target.receiving[name]
        for rank in (source, target):
            if rank.waiting_for == name:
                self._advance(rank, now)

    def _push(self, when: float, event: _Completion | _Transfer | _Arrived) -> None:
        heapq.heappush(self._events, (when, self._count, event))
        self._count += 1
