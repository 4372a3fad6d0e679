"""Receive prefetch: where in a rank's list each receive is started.

A transfer runs once both sides have started it. A receive that starts ahead of its place lets a rank get its next input
while it still computes. Order and memory limit how far ahead; from device to device, also what the send depends on.
``check``, the simulator and the executor all ask this file.

A device-to-device receive occupies its device from where it starts. So nothing that its send waits for, through any
chain of ranks, may stand behind it; and two receives that are each right alone may wait for each other. Both are
excluded by construction: the programs are run once in the abstract, every send waiting for its receive, and each rank
starts its receives in the order in which the handoffs of that one run happen.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from arachnec.analysis.communicators import HARDWARE_QUEUES, HOST_HANDOFFS, ExecutionModel, communicator_gib
from arachnec.analysis.memory import held, state_of
from arachnec.analysis.uses import Values, gib, moved_by
from arachnec.ir.nodes import Instruction, Program, quantity


@dataclass
class _Rank:
    """Where a rank stands in the run."""

    number: int
    steps: Sequence[Instruction]
    held: list[float]  # GiB during each instruction, the receives that start early included
    receives: list[int]  # places of those not yet started, the next one last
    started: dict[int, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    at: int = 0
    clock: float = 0.0  # ms
    pending: int = 0  # receives started ahead of their places


@dataclass
class HandoffOrder:
    """The abstract run. ``held`` is every rank's planned memory per instruction, ``limit`` the device's, in GiB.

    Every instruction takes its planned time, and what may happen first happens first. A receive starts when its send
    is reached, if the memory suffices and a hardware queue is left for it; otherwise the send waits.
    """

    values: Values
    held: Mapping[int, Sequence[float]]
    limit: float
    # start, number, where in the first of the ranks, and the ranks that run
    _ready: list[tuple[float, int, int, tuple[int, ...]]] = field(default_factory=list)
    _arrived: dict[object, list[_Rank]] = field(default_factory=lambda: defaultdict(list))
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _count: int = 0

    def run(self) -> dict[int, tuple[tuple[Instruction, ...], ...]]:
        """For every rank and each of its instructions, the receives to start before it."""
        self._ranks = {p.rank: self._rank(p.rank, p.instructions) for p in self.values.module.programs}
        for rank in self._ranks.values():
            self._arrive(rank)
        while self._ready:
            start, _, place, group = heapq.heappop(self._ready)
            ranks = [self._ranks[number] for number in group]
            if ranks[0].at != place:  # a send that was let go on twice
                continue
            step = ranks[0].steps[place]
            if step.op == "send":
                self._hand_off(ranks[0], self._ranks[step.peers[0]], start)
                continue
            for rank in ranks:
                rank.clock = start + (quantity(step.attrs["time"]) if "time" in step.attrs else 0.0)
                self._advance(rank)
        for rank in self._ranks.values():  # what can never run stays where it stands
            for place in rank.receives:
                rank.started[place].append(rank.steps[place])
        return {
            rank.number: tuple(tuple(rank.started.get(index, ())) for index in range(len(rank.steps)))
            for rank in self._ranks.values()
        }

    def _rank(self, number: int, steps: Sequence[Instruction]) -> _Rank:
        receives = [place for place, step in enumerate(steps) if step.op == "receive"]
        return _Rank(number, steps, list(self.held[number]), receives[::-1])

    def _advance(self, rank: _Rank) -> None:
        rank.at += 1
        self._arrive(rank)

    def _arrive(self, rank: _Rank) -> None:
        """The rank has come to its next instruction: it may run, or complete a group, or let a sender go on."""
        while rank.at < len(rank.steps) and self._has_started(rank):
            rank.pending -= 1
            rank.at += 1
        if rank.at == len(rank.steps):
            return
        self._wake_sender(rank)
        step = rank.steps[rank.at]
        if step.op == "send":
            self._push(rank.clock, (rank.number,))
        elif step.op != "receive":
            self._join(rank, step)

    def _has_started(self, rank: _Rank) -> bool:
        return rank.steps[rank.at].op == "receive" and rank.at not in rank.receives[-1:]

    def _join(self, rank: _Rank, step: Instruction) -> None:
        if len(step.peers) < 2:
            self._push(rank.clock, (rank.number,))
            return
        here = self._arrived[step.op, step.target, step.peers, moved_by(step)]
        here.append(rank)
        if len(here) == len(step.peers):
            self._push(max(member.clock for member in here), tuple(member.number for member in here))
            here.clear()

    def _wake_sender(self, rank: _Rank) -> None:
        """Let the send of this rank's next receive try again, where its rank has come to it."""
        if not rank.receives:
            return
        source = self._ranks[rank.steps[rank.receives[-1]].peers[0]]
        if self._sends_to(source, rank):
            self._push(max(source.clock, rank.clock), (source.number,))

    def _sends_to(self, source: _Rank, target: _Rank) -> bool:
        if source.at == len(source.steps) or not target.receives:
            return False
        send, receive = source.steps[source.at], target.steps[target.receives[-1]]
        return send.op == "send" and (send.target, send.peers[0]) == (receive.target, target.number)

    def _hand_off(self, source: _Rank, target: _Rank, start: float) -> None:
        if not self._sends_to(source, target):
            return
        place = target.receives[-1]
        size, between = gib(target.steps[place], "memory"), range(target.at, place)
        early = place > target.at
        if early and target.pending >= HARDWARE_QUEUES - 1:
            return
        if any(target.held[index] + size > self.limit for index in between):
            return
        if any(target.steps[index].op == "replan" for index in between):  # behind it other instructions may stand
            return
        for index in between:
            target.held[index] += size
        target.started[target.at].append(target.steps[target.receives.pop()])
        target.pending += early
        source.clock = start
        self._advance(source)
        if not early:
            target.clock = max(target.clock, start)
            self._advance(target)
        else:
            self._wake_sender(target)

    def _push(self, start: float, group: tuple[int, ...]) -> None:
        self._count += 1
        heapq.heappush(self._ready, (start, self._count, self._ranks[group[0]].at, group))


Prefetched: TypeAlias = tuple[tuple[Instruction, ...], ...]
"""For each instruction of a program, the receives to start before it."""


def prefetched_receives(values: Values, model: ExecutionModel, limit: float) -> dict[int, Prefetched]:
    """Where every rank starts its receives under an execution model, by rank.

    ``limit`` is the device's memory in GiB. Where receives follow what their sends depend on, the module must pass
    ``check`` with receives in place.
    """
    programs = values.module.programs
    if model.receives == "prefetched":
        return {program.rank: prefetch_receives(values, program, limit) for program in programs}
    if model.receives == "in-place":
        return {program.rank: in_place(program) for program in programs}
    return HandoffOrder(values, {p.rank: planned_memory(values, p) for p in programs}, limit).run()


def in_place(program: Program) -> Prefetched:
    """Every receive where it stands."""
    return tuple((step,) if step.op == "receive" else () for step in program.instructions)


def prefetch_receives(values: Values, program: Program, limit: float, encoded: Collection[str] = ()) -> Prefetched:
    """For each instruction, the receives to start before it: each as early as order and memory allow.

    ``limit`` is the device's memory in GiB. A receive moves ahead while the rank's planned memory with its buffer stays
    under the limit at every instruction in between. Receives never pass one another: per pair of ranks the proved
    order stays. Nor do they pass a ``replan``, behind which other instructions may stand. ``encoded`` are the cascades
    that were encoded before the program starts.
    """
    steps = program.instructions
    planned = list(planned_memory(values, program, encoded))
    prefetched: list[list[Instruction]] = [[] for _ in steps]
    receives = [step for step in steps if step.op == "receive"]
    fenced = any(step.op == "replan" for step in steps)
    if receives and not fenced and max(planned) + math.fsum(gib(step, "memory") for step in receives) <= limit:
        return (tuple(receives), *((),) * (len(steps) - 1))  # room for all of them at once
    earliest = 0
    for index, step in enumerate(steps):
        if step.op == "replan":
            earliest = index + 1
        if step.op != "receive":
            continue
        size = gib(step, "memory")
        place = index
        while place > earliest and planned[place - 1] + size <= limit:
            place -= 1
            planned[place] += size
        prefetched[place].append(step)
        earliest = place
    return tuple(tuple(receives) for receives in prefetched)


def planned_memory(values: Values, program: Program, encoded: Collection[str] = ()) -> tuple[float, ...]:
    """GiB on this rank while each instruction runs, as ``check`` counts them.

    ``encoded`` are the cascades that were encoded before the program starts.
    """
    always = state_of(program) + communicator_gib(values, program, HOST_HANDOFFS)
    if not encoded:
        return tuple(always + sum(parts) for parts in held(values, program))
    early = {step.target: gib(step, "memory") for step in program.instructions if _is_encoded(step, encoded)}
    totals = []
    for step, parts in zip(program.instructions, held(values, program), strict=True):
        if _is_encoded(step, encoded):
            del early[step.target]
        totals.append(always + sum(parts) + math.fsum(early.values()))
    return tuple(totals)


def _is_encoded(step: Instruction, encoded: Collection[str]) -> bool:
    return step.op == "encode" and step.target in encoded
