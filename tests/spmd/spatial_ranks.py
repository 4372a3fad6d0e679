"""Ranks that share a tensor as threads of one process: what they compute needs no process group."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor, nn

from arachnec.spmd.spatial.division import encode_divided

PATIENCE_S = 30


@dataclass
class Mail:
    """What threads send each other. They meet twice in each exchange: when all is sent, and when all is read."""

    ranks: int
    sent: dict[int, Sequence[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=PATIENCE_S)


@dataclass
class ThreadPeers:
    index: int
    mail: Mail
    calls: int = 0

    def exchange(self, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        self.calls += 1
        self.mail.sent[self.index] = [piece.contiguous().clone() for piece in sent]
        self.mail.barrier.wait()
        received = [self.mail.sent[rank][self.index] for rank in range(self.mail.ranks)]
        self.mail.barrier.wait()
        assert [tuple(piece.shape) for piece in received] == [tuple(shape) for shape in shapes]
        return received


def on_threads(ranks: int, run: Callable[[ThreadPeers], Tensor]) -> list[Tensor]:
    """What every rank returns. All have met in as many exchanges."""
    mail = Mail(ranks)
    everyone = [ThreadPeers(index, mail) for index in range(ranks)]

    def one(peers: ThreadPeers) -> Tensor:
        try:
            return run(peers)
        except BaseException:
            mail.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        results = list(threads.map(one, everyone))
    assert len({peers.calls for peers in everyone}) == 1
    return results


def encoded_by(ranks: int, encoder: nn.Module, loaded: Tensor) -> list[Tensor]:
    """What every rank has of an encoder that all run together. Each has its own: VAEs keep caches."""
    return on_threads(ranks, lambda peers: encode_divided(copy.deepcopy(encoder), loaded, peers, ranks))
