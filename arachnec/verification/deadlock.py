"""Rule 2: no deadlock. In: a lowered module's values. Out: a diagnostic per problem.

Every collective is one event. So is every send together with its matched receive. Each rank's list orders its events;
over all ranks this order must have no cycle. No back end is stricter: gloo's send, and NCCL's on one stream, complete
only when the receive is there. Sends and receives match first in, first out per ordered pair of ranks, as in gloo and
NCCL. A mismatch there would not hang; it would swap the data.

A reduce with ``early`` starts inside a backward. It is an event inside that backward: the backward's own collectives
stand before it and after it. The proof therefore holds for a device that finishes one before it continues the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import networkx as nx

from arachnec.analysis.uses import Values, bucket_of, overlapped_reduces, rank_list, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Program


@dataclass(frozen=True)
class UnmatchedSend(Diagnostic):
    title: ClassVar[str] = "rank {rank} has `{instruction}`, and rank {peer} never receives it"
    label: ClassVar[str] = "no receive for it"
    help: ClassVar[str] = "give rank {peer} a `receive %{cascade} from {rank}`, or drop the send"
    rank: int
    peer: int
    instruction: str
    cascade: str


@dataclass(frozen=True)
class UnmatchedReceive(Diagnostic):
    title: ClassVar[str] = "rank {rank} has `{instruction}`, and rank {peer} never sends it"
    label: ClassVar[str] = "no send for it"
    help: ClassVar[str] = "give rank {peer} a `send %{cascade} to {rank}`, or drop the receive"
    rank: int
    peer: int
    instruction: str
    cascade: str


@dataclass(frozen=True)
class SwappedHandoff(Diagnostic):
    title: ClassVar[str] = (
        "handoff number {number} from rank {source} to rank {target} is %{sent} where it is sent "
        "and %{received} where it is received"
    )
    label: ClassVar[str] = "receives %{received} here"
    help: ClassVar[str] = (
        "values arrive in the order they were sent: receive %{sent} first, or the two are silently swapped"
    )
    number: int
    source: int
    target: int
    sent: str
    received: str


@dataclass(frozen=True)
class GroupIncomplete(Diagnostic):
    title: ClassVar[str] = "rank {rank} waits in `{instruction}` for ranks {missing}, which never join it"
    label: ClassVar[str] = "ranks {missing} never join"
    help: ClassVar[str] = "every rank of a group has the same instruction with the same ranks in the same order"
    rank: int
    instruction: str
    missing: str


@dataclass(frozen=True)
class Deadlock(Diagnostic):
    title: ClassVar[str] = "deadlock: ranks {ranks} wait for each other"
    label: ClassVar[str] = "part of the cycle"
    help: ClassVar[str] = "{cycle}; put these in one order on all of the ranks"
    ranks: str
    cycle: str


@dataclass(frozen=True)
class StartsApart(Diagnostic):
    title: ClassVar[str] = "rank {rank} starts `{reduce}` inside `{backward}`, and ranks {others} of its group do not"
    label: ClassVar[str] = "starts inside the backward"
    help: ClassVar[str] = (
        "a rank that waits in the all-reduce holds up the others' backward: give the reduce `early` on all of these "
        "ranks, or on none"
    )
    rank: int
    reduce: str
    backward: str
    others: str


# A position in a rank's list: the enclosing instruction's index, the event's number inside it (an all-reduce may start
# inside a backward), and the event's own instruction index.
Place = tuple[int, int, int]


@dataclass(frozen=True)
class Event:
    """A point of synchronisation: its place in the list of every rank that takes part."""

    places: tuple[tuple[int, Place], ...]  # rank, place in its list

    def at(self, rank: int) -> int:
        """The index of the rank's instruction."""
        return next(place[2] for member, place in self.places if member == rank)


def check_deadlock(values: Values) -> Iterator[Diagnostic]:
    problems: list[Diagnostic] = list(_starts_apart(values))
    if problems:
        yield problems[0]
        return
    events = [*_handoffs(values, problems), *_collectives(values, problems)]
    if problems:
        yield from problems
        return
    yield from _cycle(values, events)


def _handoffs(values: Values, problems: list[Diagnostic]) -> Iterator[Event]:
    sends: dict[tuple[int, int], list[tuple[int, Instruction]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Instruction]]] = defaultdict(list)
    for program in values.module.programs:
        for index, instruction in enumerate(program.instructions):
            if instruction.op == "send":
                sends[program.rank, instruction.peers[0]].append((index, instruction))
            elif instruction.op == "receive":
                receives[instruction.peers[0], program.rank].append((index, instruction))
    for pair in sorted({*sends, *receives}):
        source, target = pair
        sent, received = sends[pair], receives[pair]
        surplus = Counter(i.target for _, i in sent)
        surplus.subtract(i.target for _, i in received)
        for name, count in surplus.items():
            if count > 0:
                last = [i for _, i in sent if i.target == name][-1]
                problems.append(UnmatchedSend(last.span, source, target, written(last), name))
            if count < 0:
                last = [i for _, i in received if i.target == name][-1]
                problems.append(UnmatchedReceive(last.span, target, source, written(last), name))
        if any(surplus.values()):
            continue
        for number, ((i, send), (j, receive)) in enumerate(zip(sent, received, strict=True), 1):
            if send.target != receive.target:
                problems.append(SwappedHandoff(receive.span, number, source, target, send.target, receive.target))
                break
            yield Event(((source, (i, 0, i)), (target, (j, 0, j))))


def _collectives(values: Values, problems: list[Diagnostic]) -> Iterator[Event]:
    """A rank's n-th run of one collective in one group is one event with the n-th runs of the other ranks."""
    members: dict[tuple[object, ...], list[tuple[int, Place, Instruction]]] = defaultdict(list)
    for program in values.module.programs:
        times: Counter[tuple[object, ...]] = Counter()
        for place, instruction, inside in _ordered(program):
            if len(instruction.peers) < 2 or instruction.op in ("send", "receive"):
                continue
            bucket = bucket_of(inside or instruction)
            collective = (instruction.op, instruction.target, instruction.peers, bucket, inside is None)
            members[(*collective, times[collective])].append((program.rank, place, instruction))
            times[collective] += 1
    for joined in members.values():
        rank, _, instruction = joined[0]
        peers = instruction.peers
        missing = tuple(sorted(set(peers) - {rank for rank, _, _ in joined})) if len(joined) < len(peers) else ()
        if missing:
            problems.append(GroupIncomplete(instruction.span, rank, written(instruction), rank_list(missing)))
        yield Event(tuple((rank, place) for rank, place, _ in joined))


def _ordered(program: Program) -> Iterator[tuple[Place, Instruction, Instruction | None]]:
    """A rank's instructions in order. A backward is split where reduces start inside it.

    The third element is the reduce that starts at the end of this part of a backward, else None.
    """
    overlapped = overlapped_reduces(program)
    moved = {index for inside in overlapped.values() for index in inside}
    for index, instruction in enumerate(program.instructions):
        part = 0
        for number in overlapped.get(index, ()):
            reduce = program.instructions[number]
            yield (index, part, index), instruction, reduce
            yield (index, part + 1, number), reduce, None
            part += 2
        if index not in moved:
            yield (index, part, index), instruction, None


def _starts_apart(values: Values) -> Iterator[StartsApart]:
    """Reduces that some ranks of a backward start inside it and others do not."""
    started: dict[tuple[str, tuple[int, ...]], dict[Hashable, dict[int, Instruction]]] = defaultdict(dict)
    for program in values.module.programs:
        for index, numbers in overlapped_reduces(program).items():
            backward = program.instructions[index]
            for reduce in (program.instructions[number] for number in numbers):
                bucket = (reduce.target, reduce.peers, bucket_of(reduce))
                started[backward.target, backward.peers].setdefault(bucket, {})[program.rank] = reduce
    for (target, peers), by_bucket in started.items():
        for ranks in by_bucket.values():
            others = tuple(sorted(set(peers) - set(ranks)))
            if others:
                rank, reduce = next(iter(ranks.items()))
                backward = Instruction("backward", target, peers)
                yield StartsApart(reduce.span, rank, written(reduce), written(backward), rank_list(others))


def _cycle(values: Values, events: list[Event]) -> Iterator[Diagnostic]:
    edges = _edges(events)
    stuck = _unreachable(len(events), edges)
    if not stuck:
        return
    graph: nx.DiGraph[int] = nx.DiGraph()
    for before, after, rank in edges:
        if before in stuck and after in stuck:
            graph.add_edge(before, after, rank=rank)
    start = nx.find_cycle(graph)[0][0]
    paths = (
        nx.shortest_path(graph, after, start) for after in graph.successors(start) if nx.has_path(graph, after, start)
    )
    cycle = [start, *min(paths, key=len)]
    steps = [(a, b, graph.edges[a, b]["rank"]) for a, b in pairwise(cycle)]
    yield _deadlock(values, events, _merged(steps))


def _edges(events: list[Event]) -> list[tuple[int, int, int]]:
    """``(before, after, rank)`` for every two events that follow each other in a rank's list."""
    lists: dict[int, list[tuple[Place, int]]] = defaultdict(list)
    for number, event in enumerate(events):
        for rank, place in event.places:
            lists[rank].append((place, number))
    return [(a, b, rank) for rank, items in lists.items() for (_, a), (_, b) in pairwise(sorted(items))]


def _unreachable(count: int, edges: list[tuple[int, int, int]]) -> set[int]:
    """The events that can never happen: what Kahn's algorithm leaves."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b, _ in edges:
        after[a].append(b)
        waiting[b] += 1
    ready = [number for number in range(count) if waiting[number] == 0]
    for number in ready:
        for b in after[number]:
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    return set(range(count)) - set(ready)


def _merged(steps: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Consecutive steps of one rank as one step, also where the cycle closes."""
    merged: list[tuple[int, int, int]] = []
    for a, b, rank in steps:
        if merged and merged[-1][2] == rank:
            merged[-1] = (merged[-1][0], b, rank)
        else:
            merged.append((a, b, rank))
    if len(merged) > 2 and merged[0][2] == merged[-1][2]:
        merged[0] = (merged[-1][0], merged[0][1], merged[0][2])
        merged.pop()
    return merged


def _deadlock(values: Values, events: list[Event], steps: list[tuple[int, int, int]]) -> Deadlock:
    programs = {program.rank: program for program in values.module.programs}

    def instruction(rank: int, number: int) -> Instruction:
        return programs[rank].instructions[events[number].at(rank)]

    cycle = "; ".join(
        f"rank {rank} has `{written(instruction(rank, a))}` before `{written(instruction(rank, b))}`"
        for a, b, rank in steps
    )
    first = instruction(steps[0][2], steps[0][0])
    return Deadlock(first.span, rank_list(tuple(sorted({rank for _, _, rank in steps}))), cycle)
