"""What a back end does with a lowered program, as actions of hosts. It is written apart from ``check``, to test it.

It follows the executor and torch's NCCL back end: a collective's stream waits for what the host has computed so far,
the computation waits for the collective, and nobody but a device-wide wait makes the host wait for either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from arachnec.analysis.receive_prefetch import Prefetched
from arachnec.analysis.stage_ranks import learning_ranks
from arachnec.analysis.uses import Values, moved_by, overlapped_reduces, written
from arachnec.ir.nodes import Instruction, Program, integer, integers
from tests.emulator.machine import COMPUTE, Action, Await, Connect, Fence, Launch, Post, Send

LAYERS = 2  # of a model's blocks that are told apart


@dataclass(frozen=True)
class Backend:
    """How handoffs travel. A lazy connection blocks the host at its first use, a blocking handoff every time."""

    handoffs: str = "host"  # or "device"
    lazy: bool = False
    blocking: bool = False  # the host waits in every send and receive, as gloo's plain ones make it


def actions_of(values: Values, posted: Mapping[int, Prefetched], backend: Backend) -> dict[int, list[Action]]:
    """Every rank's host. ``posted`` is where it starts its receives."""
    return {p.rank: list(_Host(values, p, posted[p.rank], backend).actions()) for p in values.module.programs}


@dataclass
class _Host:
    values: Values
    program: Program
    posted: Prefetched
    backend: Backend
    coming: set[str] = field(default_factory=set)
    times: Counter[Hashable] = field(default_factory=Counter)  # how often something was done, to match it
    leaving: dict[str, list[Hashable]] = field(default_factory=lambda: defaultdict(list))
    connected: set[Hashable] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)
    gathering: dict[str, Hashable] = field(default_factory=dict)  # the stream of each stage that was not waited for

    @property
    def rank(self) -> int:
        return self.program.rank

    def actions(self) -> Iterator[Action]:
        inside = overlapped_reduces(self.program)
        for index, (step, receives) in enumerate(zip(self.program.instructions, self.posted, strict=True)):
            for receive in receives:
                yield from self._post(receive)
            if step.op not in ("send", "receive"):
                yield from self._inputs(step)
            yield from self._execute(index, step, inside.get(index, []))

    def _execute(self, index: int, step: Instruction, inside: list[int]) -> Iterator[Action]:
        match step.op:
            case "receive":
                pass
            case "send":
                yield from self._send(step)
            case "free":
                yield from self._sent(step.target)
            case "reduce":
                yield from self._reduce(index)
            case "gather":
                yield from self._gather(step)
            case "norm":
                yield from self._reduced(step)
                yield from self._meet(step, "cell" if step.peers in self._cells else "all-reduce", step.peers)
            case "learn":
                yield from self._reduced(step)
                assert self.values.module.cluster is not None
                for ranks in learning_ranks(self.values.module, self.values.module.cluster):
                    if self.rank in ranks:
                        yield from self._meet(step, "all-reduce", ranks)
            case "step":
                yield from self._reduced(step)
                yield Launch(self._text(step))
            case _:
                yield from self._compute(step, inside)

    def _gather(self, step: Instruction) -> Iterator[Action]:
        """Layer after layer; a forward waits for them, here for all at once."""
        for layer in integers(step.attrs["layers"]):
            yield from self._meet(step, "all-reduce", step.peers, awaited=False, named=layer)
        self.gathering[step.target] = ("all-reduce", frozenset(step.peers))

    def _reduced(self, step: Instruction) -> Iterator[Action]:
        """The computation waits for all all-reduces."""
        for stream in {name for number in self.reduced for name in self._streams_of(number)}:
            yield Fence(self._text(step), COMPUTE, stream)

    @property
    def _cells(self) -> set[tuple[int, ...]]:
        return {integers(step.attrs["cell"]) for step in self.program.instructions if "cell" in step.attrs}

    def _compute(self, step: Instruction, inside: list[int]) -> Iterator[Action]:
        """Blocks and their collectives in turn; a gradient all-reduce starts as soon as a part of them is through."""
        stage = self.values.cascades[step.target].stage
        if stage in self.gathering:
            yield Fence(self._text(step), COMPUTE, self.gathering.pop(stage))
        cell, backward = integers(step.attrs.get("cell", ())), step.op == "backward"
        gathered = integers(step.attrs.get("gather", ()))[:: -1 if backward else 1]
        for layer in gathered:  # one ahead of the blocks, whose order is the same
            yield from self._meet(step, "cell", cell, named=("gather", layer))
        for part in range(len(inside) + 1):
            for _ in range(LAYERS):
                yield Launch(self._text(step))
                for ranks in self._groups(step):
                    yield from self._meet(step, "cascade", ranks)
            yield from self._meet(step, "cascade", step.peers)
            if part < len(inside):
                yield from self._reduce(inside[part])
        yield Launch(self._text(step))
        for layer in integers(step.attrs.get("scatter", ()))[::-1]:
            yield from self._meet(step, "cell", cell, awaited=False, named=("scatter", layer))

    def _groups(self, step: Instruction) -> list[tuple[int, ...]]:
        """Rows of ranks that exchange heads and columns that pass keys round, this rank's."""
        forward = next((s for s in self.program.instructions if (s.op, s.target) == ("forward", step.target)), step)
        degree = len(step.peers) // integer(forward.attrs.get("side", 1))
        other = integers(forward.attrs.get("unconditional", ()))
        if other:
            return self._of_branches(step, forward, other)
        if degree < 2:
            return []
        ring = integer(forward.attrs.get("ring", 1))
        width = integer(forward.attrs.get("ulysses", degree // ring))
        first = step.peers.index(self.rank) // degree * degree
        clip = step.peers[first : first + degree]
        own = clip.index(self.rank)
        row = clip[own // width * width : (own // width + 1) * width]
        return [row, clip[own % width :: width]]

    def _of_branches(self, step: Instruction, forward: Instruction, other: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Of a denoise whose unconditional branch has the last ranks, of their own number and product."""
        first = len(step.peers) - other[0] * other[1]
        ring = integer(forward.attrs.get("ring", 1))
        own = integer(forward.attrs.get("ulysses", first // ring))
        for ranks, width in ((step.peers[:first], own), (step.peers[first:], other[0])):
            if self.rank in ranks and len(ranks) > 1:
                at = ranks.index(self.rank)
                return [ranks[at // width * width : (at // width + 1) * width], ranks[at % width :: width]]
        return []

    def _meet(
        self, step: Instruction, kind: str, ranks: tuple[int, ...], awaited: bool = True, named: Hashable = None
    ) -> Iterator[Action]:
        if len(ranks) < 2:
            return
        stream = (kind, frozenset(ranks))
        text = self._text(step)
        yield from self._connect(text, stream, ranks)
        what = (step.op, step.target, stream, moved_by(step), named)
        self.times[what] += 1
        yield Fence(text, stream, COMPUTE)
        yield Launch(text, stream, (*what, self.times[what]), tuple(sorted(ranks)))
        if awaited:
            yield Fence(text, COMPUTE, stream)

    def _reduce(self, index: int) -> Iterator[Action]:
        if index in self.reduced:
            return
        self.reduced.add(index)
        step = self.program.instructions[index]
        yield from self._meet(step, "all-reduce", step.peers, awaited=False)

    def _streams_of(self, index: int) -> Iterator[Hashable]:
        peers = self.program.instructions[index].peers
        if len(peers) > 1:
            yield "all-reduce", frozenset(peers)

    def _send(self, step: Instruction) -> Iterator[Action]:
        text, (target,) = self._text(step), step.peers
        message = self._message(step.target, self.rank, target)
        if self.backend.handoffs == "host":
            yield from self._connect(text, ("gloo", frozenset((self.rank, target))), (self.rank, target))
            yield Fence(text, "copies", COMPUTE)
            yield Send(text, message, "copies")
            if self.backend.blocking:
                yield Await(text, message)
        else:
            yield from self._transfer(text, message, self.rank, target)
        self.leaving[step.target].append(message)

    def _post(self, step: Instruction) -> Iterator[Action]:
        text, (source,) = self._text(step), step.peers
        message = self._message(step.target, source, self.rank)
        if self.backend.handoffs == "host":
            yield from self._connect(text, ("gloo", frozenset((source, self.rank))), (source, self.rank))
            yield Post(text, message)
            if self.backend.blocking:
                yield Await(text, message)
        else:
            yield from self._transfer(text, message, source, self.rank)
        self.coming.add(step.target)

    def _transfer(self, text: str, message: Hashable, source: int, target: int) -> Iterator[Action]:
        """From device to device: a kernel on both, on a communicator of this direction."""
        stream = ("handoff", source, target)
        yield from self._connect(text, stream, (source, target))
        yield Fence(text, stream, COMPUTE)
        yield Launch(text, stream, message, (source, target))

    def _inputs(self, step: Instruction) -> Iterator[Action]:
        """Wait for what the instruction reads, at its first use."""
        for name in self.values.reads(step):
            if name not in self.coming:
                continue
            self.coming.remove(name)
            text = f"the value of `{self._text(step)}`"
            sources = [
                s.peers[0] for s in self.program.instructions if (s.op, s.target) == ("receive", name)
            ]  # several, where a value comes in parts
            for source in sources:
                if self.backend.handoffs == "host":
                    yield Await(text, self._message(name, source, self.rank))
                else:
                    yield Fence(text, COMPUTE, ("handoff", source, self.rank))

    def _sent(self, name: str) -> Iterator[Action]:
        """The value's memory is given back once its sends are through with it."""
        for message in self.leaving.pop(name, []):
            if self.backend.handoffs == "host":
                yield Await(f"`free %{name}`", message)
            else:
                _, _, source, target = message  # type: ignore[misc]
                yield Fence(f"`free %{name}`", COMPUTE, ("handoff", source, target))

    def _message(self, name: str, source: int, target: int) -> Hashable:
        return "value", name, source, target

    def _connect(self, text: str, connection: Hashable, members: tuple[int, ...]) -> Iterator[Action]:
        if self.backend.lazy and connection not in self.connected:
            self.connected.add(connection)
            yield Connect(text, connection, members)

    def _text(self, step: Instruction) -> str:
        return f"`{written(step)}`"
