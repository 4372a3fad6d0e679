"""The connections that handoffs travel over: gloo between ranks that talk, and between no others.

A full mesh has n^2 connections, and fails on large clusters. With ``TORCH_GLOO_LAZY_INIT`` a pair connects at its first
message. The passive side of a first message ignores every timeout where its peer is gone, so the first message of a
pair is a byte of ours, sent while a plan is made ready, in a thread that we need not wait for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from arachnec.ir.diagnostic import user_error

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
