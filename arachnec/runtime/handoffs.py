"""Values on their way from the ranks that made them to the ranks that read them, and the connections they take.

A handoff is one message: the bytes of one tensor in the host's memory, whose shape the receiver knows beforehand; the
batch that it becomes part of is made on the host. Sending never holds up the training thread: threads of their own
wait for the copy from the device, and for the receiver.

A full mesh has n^2 connections, and fails on large clusters. With ``TORCH_GLOO_LAZY_INIT`` a pair connects at its first
message. The passive side of a first message ignores every timeout where its peer is gone, so the first message of a
pair is a byte of ours, sent while a plan is made ready, in a thread that we need not wait for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Program
from arachnec.runtime.device_runtime import OnHost

MOST_PEERS = 64  # that a rank stays connected to from plan to plan
CONNECT_S = 60.0
HELLO = 2**20  # the tag of a pair's first message; handoffs have those below


Pair = tuple[int, int]


class HandoffConnections:
    """Connections of the pairs that have been asked for; every rank asks for the same pairs in the same order.

    They stay from plan to plan until some rank would have more than ``most_peers``: then all are given up, and those
    that the plan at hand needs are made anew.
    """

    def __init__(
        self, *, most_peers: int = MOST_PEERS, connect_s: float = CONNECT_S, timeout: timedelta | None = None
    ) -> None:
        self._most_peers = most_peers
        self._connect_s = connect_s
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._pairs: set[Pair] = set()
        self.renewed = 0  # how often connections were given up

    @property
    def group(self) -> dist.ProcessGroup:
        """The gloo group of all ranks whose asked-for pairs are connected."""
        assert self._group is not None, "no pair was asked for"
        return self._group

    def peers(self) -> int:
        """How many ranks this one is connected to."""
        return sum(dist.get_rank() in pair for pair in self._pairs)

    def ensure(self, wanted: Iterable[Pair]) -> None:
        """Connect these pairs, in either direction. Collective.

        Raises ``UserError`` where a peer does not answer in time.
        """
        pairs = {(min(pair), max(pair)) for pair in wanted}
        if pairs <= self._pairs:
            return
        crowded = most_peers_of(pairs | self._pairs) > self._most_peers
        if self._group is None or (crowded and self._pairs):
            self._renew()
        missing = sorted(pairs - self._pairs)
        self._connect(self.group, [sum(pair) - dist.get_rank() for pair in missing if dist.get_rank() in pair])
        self._pairs.update(missing)

    def close(self) -> None:
        """Give up all connections. Collective."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self._group = None
        self._pairs.clear()

    def _renew(self) -> None:
        if self._group is not None:
            dist.barrier()  # nobody closes what another still waits on
            self.close()
            self.renewed += 1
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def _connect(self, group: dist.ProcessGroup, peers: list[int]) -> None:
        """Meet each of these peers in turn.

        All ranks go through their pairs in one order, so the first pair that is left is the next of both its ranks.
        """
        state = _Progress(peers)
        thread = threading.Thread(target=state.meet_all, args=(group,), name="handoff-connect", daemon=True)
        thread.start()
        thread.join(self._connect_s)
        if thread.is_alive() or state.failure:
            reason = state.failure or "no answer"
            peer = peers[state.met]
            raise user_error(
                f"rank {dist.get_rank()} could not connect to rank {peer} within {self._connect_s:g} s: {reason}",
                help=f"rank {peer} has ended, hangs, or cannot be reached from here; its own output says more",
            )


@dataclass
class _Progress:
    peers: list[int]
    met: int = 0
    failure: str = ""

    def meet_all(self, group: dist.ProcessGroup) -> None:
        byte = torch.zeros(1, dtype=torch.uint8)
        try:
            for peer in self.peers:
                meet = dist.isend if dist.get_rank() < peer else dist.irecv
                work = meet(byte, peer, group=group, tag=HELLO)
                assert work is not None
                work.wait()
                self.met += 1
        except RuntimeError as error:
            self.failure = str(error)


def most_peers_of(pairs: Iterable[Pair]) -> int:
    """The peers of the rank that has most of them."""
    counts = Counter(rank for pair in pairs for rank in pair)
    return max(counts.values(), default=0)


SMALL = 16 * 2**20  # bytes of a value that may be there beyond its `free`


@contextmanager
def told_by_ranks(cascade: str, source: int, target: int) -> Iterator[None]:
    """What fails inside is a mistake that names both ranks."""
    try:
        yield
    except RuntimeError as error:
        raise user_error(
            f"the output of %{cascade} did not get from rank {source} to rank {target}: {error}",
            help="one of the two has ended or hangs; its own output says more",
        ) from error


@dataclass(frozen=True)
class TensorSpec:
    """Shape and precision of a handed-off tensor. One of bytes may come in ``parts``: from which rank, from which byte,
    and up to which."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[int, int, int], ...] = ()


@dataclass
class Received:
    """A value on its way to this rank, or a part of one. ``wait`` may be called from any thread, and again."""

    cascade: str
    source: int
    work: dist.Work
    buffer: Tensor
    value: Tensor | None = None  # of which it is a part
    before: Received | None = None  # the part that was prefetched before
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _arrived: bool = False

    @property
    def ready(self) -> bool:
        return self._arrived and (self.before is None or self.before.ready)

    def wait(self) -> Tensor:
        """The value, once this and all parts that were prefetched before it are there."""
        if self.before is not None:
            self.before.wait()
        with self._lock:
            if not self._arrived:
                with told_by_ranks(self.cascade, self.source, dist.get_rank()):
                    self.work.wait()
                self._arrived = True
        return self.buffer if self.value is None else self.value


class Notes(Protocol):
    """Who wants to know when messages begin to travel and arrive."""

    def sends(self, cascade: str, peer: int, size: int) -> None: ...

    def expects(self, coming: Received) -> None: ...


class HandoffThreads:
    """Two threads that stay from step to step: one starts sends once their values are there, one awaits their end."""

    def __init__(self) -> None:
        self._start = ThreadPoolExecutor(1, "handoff-send")
        self._end = ThreadPoolExecutor(1, "handoff-sent")
        self._latest: Future[tuple[dist.Work, Tensor]] | None = None  # that the first has

    def send(
        self,
        value: OnHost,
        to: int,
        group: dist.ProcessGroup,
        tag: int,
        cascade: str,
        notes: Notes | None = None,
        part: slice | None = None,
    ) -> Sending:
        """Send once the value is on the host, or a ``part`` of its bytes; it is held until the receiver has it.

        What is there already, with none before it on the way, is sent from here: two threads less to wake.
        """
        if value.ready and (self._latest is None or self._latest.done()):
            with told_by_ranks(cascade, dist.get_rank(), to):
                return _Started(*_start_send(value, to, group, tag, cascade, notes, part), to, cascade)
        self._latest = self._start.submit(_start_send, value, to, group, tag, cascade, notes, part)
        return self._end.submit(_end_send, self._latest, to, cascade)

    def close(self) -> None:
        self._start.shutdown(wait=False, cancel_futures=True)
        self._end.shutdown(wait=False, cancel_futures=True)


def _start_send(
    value: OnHost,
    to: int,
    group: dist.ProcessGroup,
    tag: int,
    cascade: str,
    notes: Notes | None,
    part: slice | None,
) -> tuple[dist.Work, Tensor]:
    flat = value.wait().contiguous()
    if part is not None:
        flat = flat[part]
    if notes is not None:
        notes.sends(cascade, to, flat.numel() * flat.element_size())
    work = dist.isend(_bytes(flat), to, group=group, tag=tag)
    assert work is not None
    return work, flat


def _end_send(started: Future[tuple[dist.Work, Tensor]], to: int, cascade: str) -> None:
    with told_by_ranks(cascade, dist.get_rank(), to):
        work, value = started.result()
    _Started(work, value, to, cascade).result()


class Sending(Protocol):
    """A value on its way to another rank."""

    def result(self) -> None:
        """Wait until the receiver has it. Raises ``UserError`` where it never will."""
        ...


@dataclass(frozen=True)
class _Started:
    """A send that has begun; holds the value."""

    work: dist.Work
    value: Tensor
    to: int
    cascade: str

    def result(self) -> None:
        with told_by_ranks(self.cascade, dist.get_rank(), self.to):
            self.work.wait()


class Handoffs:
    """The sends and receives of one iteration on one rank.

    ``tags`` numbers the cascades, the same on every rank: a message is told from others by it, never by its order.
    """

    def __init__(
        self,
        connections: HandoffConnections,
        threads: HandoffThreads,
        tags: Mapping[str, int],
        notes: Notes | None = None,
    ) -> None:
        self._connections = connections
        self._threads = threads
        self._tags = tags
        self._notes = notes
        self._sent: dict[str, list[Sending]] = {}
        self._let_go: list[Sending] = []
        self._coming: list[Received] = []
        self._parts: dict[str, Received] = {}  # the latest of each value that comes in several

    def send(self, name: str, value: OnHost, to: int, part: slice | None = None) -> None:
        """Have a value sent, or a ``part`` of its bytes; it is held until the receiver has it."""
        group = self._connections.group
        self._sent.setdefault(name, []).append(
            self._threads.send(value, to, group, self._tags[name], name, self._notes, part)
        )

    def prefetch(self, name: str, spec: TensorSpec, source: int) -> Received:
        """Start receiving into a buffer of its own, or into that of the value's parts before; does not wait."""
        before = self._parts.get(name)
        value = torch.empty(spec.shape, dtype=spec.dtype) if before is None else before.value
        assert value is not None
        buffer = next((value[first:end] for rank, first, end in spec.parts if rank == source), value)
        work = dist.irecv(_bytes(buffer), source, group=self._connections.group, tag=self._tags[name])
        assert work is not None
        coming = Received(name, source, work, buffer, value, before)
        if spec.parts:
            self._parts[name] = coming
        self._coming.append(coming)
        if self._notes is not None:
            self._notes.expects(coming)
        return coming

    def let_go(self, name: str) -> None:
        """Do without a value, which is not held any more then; a small one until the next is let go.

        To wait for each here would stop the rank until another thread has had a core, after every message.
        """
        leaving = self._sent.pop(name, [])
        small = all(isinstance(sent, _Started) and sent.value.nbytes <= SMALL for sent in leaving)
        for sent in (*self._let_go, *(() if small else leaving)):
            sent.result()
        self._let_go = leaving if small else []

    def finish(self) -> None:
        """Wait for all of them. Raises ``UserError`` for one that failed."""
        for name in list(self._sent):
            self.let_go(name)
        for sent in self._let_go:
            sent.result()
        self._let_go = []
        for coming in self._coming:
            coming.wait()


def handoff_pairs(programs: Sequence[Program]) -> tuple[tuple[int, int], ...]:
    """Every (from, to) that some program sends over, sorted."""
    return tuple(sorted({(p.rank, step.peers[0]) for p in programs for step in p.instructions if step.op == "send"}))


def _bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
