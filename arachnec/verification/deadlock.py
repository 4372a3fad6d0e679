"""Rule 2: no deadlock, as a back end posts and connects. In: a lowered module and an execution model. Out: problems.

Every collective is one event. So is every send together with its matched receive, and every connection that two hosts
make. Each rank comes to its events in one order: that in which its host *posts* them, which for a prefetched receive is
not where it stands in the list. Over all ranks this order must have no cycle.

Without a cycle nothing stands still, whatever a rank waits for. Take the first event, in an order of all events that
every rank keeps, that has not happened. On each of its ranks all that was posted before has happened. So its host comes
to it: no wait for the whole device, for a connection or for a full queue holds it. And its kernel comes to the head of
its stream, though the stream is shared and has fences. With a cycle, device-to-device ranks that wait for their whole
device after every operation do stand still. So the rule is exact for "a device-wide wait anywhere".

A handoff over the host network occupies no device, and posting a receive holds up nobody. Its event stands where the
receive stands in the list, the latest place that a back end may post it: a send may then even wait for it.

A reduce with ``early`` starts inside a backward, or inside its ``weight`` where that is split. It is an event inside:
the backward's own collectives stand before it and after it.

Every communicator runs on a stream of its own, until torch's pool is used up and two of them share one. Every kernel
that spins, waiting for other ranks, holds a hardware queue; a device with none left starts nothing else.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TypeAlias

import networkx as nx

from arachnec.analysis.communicators import (
    HARDWARE_QUEUES,
    STREAMS,
    Communicator,
    ExecutionModel,
    communicators,
    handoff_channel,
)
from arachnec.analysis.receive_prefetch import Prefetched
from arachnec.analysis.uses import Values, bucket_of, moved_by, overlapped_reduces, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.nodes import Instruction, Program
from arachnec.verification.handoffs import Handoff, match_handoffs

# A position in a rank's list: the enclosing instruction's index, the event's number beside or inside it (receives are
# posted before it, an all-reduce may start inside a backward), and the event's own instruction index.
Place: TypeAlias = tuple[int, int, int]
Step: TypeAlias = tuple[int, int, int]
"""On a rank, one event before another: their numbers, then the rank."""


@dataclass(frozen=True)
class Event:
    """A point of synchronisation: its place in the list of every rank that takes part."""

    places: tuple[tuple[int, Place], ...]  # rank, place in its list

    def at(self, rank: int) -> Place:
        """Where the rank comes to it."""
        return next(place for member, place in self.places if member == rank)


def find_cycle(events: list[Event]) -> list[Step]:
    """A short cycle of events that wait for each other, one step per rank in it; empty where there is none."""
    edges = _edges(events)
    stuck = _unreachable(len(events), edges)
    if not stuck:
        return []
    graph: nx.DiGraph[int] = nx.DiGraph()
    for before, after, rank in edges:
        if before in stuck:  # and so is what waits for it
            graph.add_edge(before, after, rank=rank)
    start = nx.find_cycle(graph)[0][0]
    paths = (
        nx.shortest_path(graph, after, start) for after in graph.successors(start) if nx.has_path(graph, after, start)
    )
    cycle = [start, *min(paths, key=len)]
    return _merged([(a, b, graph.edges[a, b]["rank"]) for a, b in pairwise(cycle)])


def _edges(events: list[Event]) -> list[Step]:
    """``(before, after, rank)`` for every two events that follow each other in a rank's list."""
    lists: dict[int, list[tuple[Place, int]]] = defaultdict(list)
    for number, event in enumerate(events):
        for rank, place in event.places:
            lists[rank].append((place, number))
    return [(a, b, rank) for rank, items in lists.items() for (_, a), (_, b) in pairwise(sorted(items))]


def _unreachable(count: int, edges: list[Step]) -> set[int]:
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


def _merged(steps: list[Step]) -> list[Step]:
    """Consecutive steps of one rank as one step, also where the cycle closes."""
    merged: list[Step] = []
    for a, b, rank in steps:
        if merged and merged[-1][2] == rank:
            merged[-1] = (merged[-1][0], b, rank)
        else:
            merged.append((a, b, rank))
    first, *others = merged
    if others and others[-1][2] == first[2]:
        return [(others[-1][0], first[1], first[2]), *others[:-1]]
    return merged


def check_deadlock(values: Values, model: ExecutionModel, posted: Mapping[int, Prefetched]) -> Iterator[Diagnostic]:
    """``posted`` is where each rank starts its receives; it is read only where that matters to other ranks."""
    problems: list[Diagnostic] = list(_starts_apart(values))
    if problems:
        yield problems[0]
        return
    handoffs, collectives = list(match_handoffs(values, problems)), list(_collectives(values, problems))
    if problems:
        yield from problems
        return
    places = _posted_places(values, posted) if model.posted_place_counts else {}
    events = [*collectives, *_handoff_events(handoffs, places if model.handoffs == "device" else {})]
    if model.connections == "first-use":
        events += _connections(handoffs, places)
    steps = find_cycle(events)
    if steps:
        yield _deadlock(values, events, steps)


def _posted_places(values: Values, posted: Mapping[int, Prefetched]) -> dict[tuple[int, int], Place]:
    """Where a rank comes to each of its receives, by the rank and the receive's index in its list."""
    places: dict[tuple[int, int], Place] = {}
    for program in values.module.programs:
        indices: dict[tuple[str, tuple[int, ...]], deque[int]] = defaultdict(deque)
        for index, step in enumerate(program.instructions):
            if step.op == "receive":
                indices[step.target, step.peers].append(index)
        for place, receives in enumerate(posted[program.rank]):
            for number, step in enumerate(receives):
                index = indices[step.target, step.peers].popleft()
                # even, and before the instruction's own 0: a connection that it makes comes right before it
                places[program.rank, index] = (place, 2 * (number - len(receives)), index)
    return places


def _handoff_events(handoffs: list[Handoff], places: Mapping[tuple[int, int], Place]) -> Iterator[Event]:
    for one in handoffs:
        receive = places.get((one.target, one.receive), (one.receive, 0, one.receive))
        yield Event(((one.source, (one.send, 0, one.send)), (one.target, receive)))


def _connections(handoffs: list[Handoff], places: Mapping[tuple[int, int], Place]) -> Iterator[Event]:
    """The first use of a pair of ranks, in either direction: both hosts wait there until the other calls too."""
    first: dict[tuple[int, int], dict[int, Place]] = defaultdict(dict)
    for one in handoffs:
        pair = (min(one.source, one.target), max(one.source, one.target))
        uses = (one.source, (one.send, 0, one.send)), (one.target, places[one.target, one.receive])
        for rank, place in uses:
            before = (place[0], place[1] - 1, place[2])
            first[pair][rank] = min(before, first[pair].get(rank, before))
    yield from (Event(tuple(ranks.items())) for ranks in first.values())


def _collectives(values: Values, problems: list[Diagnostic]) -> Iterator[Event]:
    """A rank's n-th run of one collective in one group is one event with the n-th runs of the other ranks."""
    members: dict[tuple[object, ...], list[tuple[int, Place, Instruction]]] = defaultdict(list)
    for program in values.module.programs:
        times: dict[tuple[object, ...], Iterator[int]] = defaultdict(count)
        for place, instruction, inside in _ordered(program):
            if len(instruction.peers) < 2 or instruction.op in ("send", "receive"):
                continue
            moved = moved_by(inside or instruction)
            collective = (instruction.op, instruction.target, instruction.peers, moved, inside is None)
            members[(*collective, next(times[collective]))].append((program.rank, place, instruction))
    for joined in members.values():
        rank, _, instruction = joined[0]
        peers = instruction.peers
        missing = () if len(joined) == len(peers) else tuple(sorted(set(peers) - {rank for rank, _, _ in joined}))
        if missing:
            lacking = rank_list(missing)
            problems.append(
                Mistake(
                    instruction.span,
                    f"rank {rank} waits in `{written(instruction)}` for ranks {lacking}, which never join it",
                    kind="group incomplete",
                    label=f"ranks {lacking} never join",
                    help="every rank of a group has the same instruction with the same ranks in the same order",
                )
            )
        yield Event(tuple((rank, place) for rank, place, _ in joined))


def _ordered(program: Program) -> Iterator[tuple[Place, Instruction, Instruction | None]]:
    """A rank's instructions in order. A backward or weight is divided where reduces start inside it.

    The third element is the reduce that starts at the end of this part of a backward, else None.
    """
    overlapped = overlapped_reduces(program)
    moved = {index for inside in overlapped.values() for index in inside}
    for index, instruction in enumerate(program.instructions):
        part = count()
        for number in overlapped.get(index, ()):
            reduce = program.instructions[number]
            yield (index, next(part), index), instruction, reduce
            yield (index, next(part), number), reduce, None
        if index not in moved:
            yield (index, next(part), index), instruction, None


def _starts_apart(values: Values) -> Iterator[Diagnostic]:
    """Reduces that some ranks of a backward start inside it and others do not."""
    started: dict[tuple[str, str, tuple[int, ...]], dict[Hashable, dict[int, Instruction]]] = defaultdict(dict)
    for program in values.module.programs:
        for index, numbers in overlapped_reduces(program).items():
            backward = program.instructions[index]
            for reduce in (program.instructions[number] for number in numbers):
                shards = "cell" in reduce.attrs  # of which every member of a cell has its own, over its own ranks
                bucket = (reduce.target, () if shards else reduce.peers, bucket_of(reduce))
                started[backward.op, backward.target, backward.peers].setdefault(bucket, {})[program.rank] = reduce
    for (op, target, peers), by_bucket in started.items():
        for ranks in by_bucket.values():
            others = tuple(sorted(set(peers) - set(ranks)))
            if others:
                rank, reduce = next(iter(ranks.items()))
                backward = Instruction(op, target, peers)
                yield Mistake(
                    reduce.span,
                    f"rank {rank} starts `{written(reduce)}` inside `{written(backward)}`, and ranks "
                    f"{rank_list(others)} of its group do not",
                    kind="starts apart",
                    label="starts inside the backward",
                    help=(
                        "a rank that waits in the all-reduce holds up the others' backward: give the reduce "
                        "`early` on all of these ranks, or on none"
                    ),
                )


def _deadlock(values: Values, events: list[Event], steps: list[Step]) -> Diagnostic:
    programs = {program.rank: program for program in values.module.programs}

    def place(rank: int, event: int) -> tuple[Instruction, bool]:
        """What the rank does there, and whether it is a receive ahead of its place."""
        index, _, own = events[event].at(rank)
        step = programs[rank].instructions[own]
        return step, step.op == "receive" and index != own

    parts = [(rank, place(rank, a), place(rank, b)) for a, b, rank in steps]
    cycle = "; ".join(
        f"rank {rank} {'posts' if early else 'has'} `{written(a)}` before `{written(b)}`"
        for rank, (a, early), (b, _) in parts
    )
    ranks = rank_list(tuple(sorted({rank for _, _, rank in steps})))
    prefetched = [step for _, *ends in parts for step, early in ends if early]
    if prefetched:
        return Mistake(
            prefetched[0].span,
            f"deadlock: ranks {ranks} wait for each other where receives are posted ahead of their places",
            kind="prefetch deadlock",
            label="posted too early",
            help=(
                f"{cycle}; hand over on the host's network with connections made at the start, or post each receive "
                "after what its send depends on"
            ),
        )
    return Mistake(
        parts[0][1][0].span,
        f"deadlock: ranks {ranks} wait for each other",
        kind="deadlock",
        label="part of the cycle",
        help=f"{cycle}; put these in one order on all of the ranks",
    )


def check_device_limits(
    values: Values, model: ExecutionModel, posted: Mapping[int, Prefetched]
) -> Iterator[Diagnostic]:
    """At most ``STREAMS`` communicators, and one hardware queue free of kernels that spin, on every rank with a device.

    CPUs have neither. ``posted`` is where each rank starts its receives; it is read only where they occupy the device.
    """
    cluster = values.module.cluster
    if cluster is None or cluster.attrs.get("device") == "cpu":
        return
    for program in values.module.programs:
        count = len(communicators(program, model))
        if count > STREAMS:
            yield Mistake(
                program.span,
                f"rank {program.rank} needs {count} communicators, and there are {STREAMS} streams for them",
                kind="too many streams",
                label="in this program",
                help="run its cascades on fewer different groups of ranks",
            )
        receives = posted[program.rank] if model.handoffs == "device" else ((),) * len(program.instructions)
        yield from _pending(values, model, program, receives)


def _pending(values: Values, model: ExecutionModel, program: Program, posted: Prefetched) -> Iterator[Diagnostic]:
    """Where too many communicators have a kernel that may wait for another rank."""
    pending: dict[str, set[Communicator]] = {}  # the communicators, by the value or stage that is under way on them
    for step, receives in zip(program.instructions, posted, strict=True):
        begun = (*receives, step) if receives else (step,)
        started = [(one.target, name) for one in begun for name in _starts(one, program.rank, model)]
        for target, name in started:
            pending.setdefault(target, set()).add(name)
        busy = set().union(*pending.values()) if started else set()
        if len(busy) >= HARDWARE_QUEUES:
            yield Mistake(
                step.span,
                f"rank {program.rank} has {len(busy)} kernels waiting for other ranks in `{written(step)}`",
                kind="too many pending",
                label="one more waits here",
                help=(
                    f"a device has {HARDWARE_QUEUES} hardware queues, and one must be left to compute: post fewer "
                    "receives ahead, or hand over on the host's network"
                ),
            )
            return
        for target in _waits(values, step) if pending else ():
            pending.pop(target, None)


def _starts(step: Instruction, rank: int, model: ExecutionModel) -> Iterator[Communicator]:
    """The communicator on which an instruction leaves a kernel behind that it does not wait for."""
    if step.op in ("gather", "reduce") and len(step.peers) > 1:
        yield "all-reduce", frozenset(step.peers)
    elif model.handoffs == "device" and step.op in ("send", "receive"):
        yield handoff_channel(step, rank)


def _waits(values: Values, step: Instruction) -> tuple[str, ...]:
    """The values and stages whose communication is over once the instruction has run."""
    if step.op in ("step", "free"):
        return (step.target,)
    if step.op == "forward":  # it reads what was gathered of its stage
        return (*values.reads(step), values.cascades[step.target].stage)
    return () if step.op == "send" else values.reads(step)
