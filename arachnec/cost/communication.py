"""What the ranks of a cascade send each other, bytes and messages, and how long links take to carry it.

Ulysses all-to-all (arXiv 2309.14509, section 3), ring attention (arXiv 2310.01889), the gather behind the last block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arachnec.cluster.topology import Link

GIB = 2**30


@dataclass(frozen=True)
class Volumes:
    """Of one cascade, over all its forwards and backwards; bytes are those of one rank."""

    ulysses: int
    ring: int
    traded: float = 0.0  # bytes in all-to-alls of ``ulysses`` ranks, what stays on the rank included
    trades: float = 0.0  # all-to-alls
    passed: float = 0.0  # bytes handed to the next rank of the ring
    hops: float = 0.0  # times that it hands something on
    gathered: float = 0.0  # bytes of whole tensors gathered from all ranks
    gathers: float = 0.0

    @property
    def degree(self) -> int:
        return self.ulysses * self.ring

    @property
    def messages(self) -> float:
        """Latencies that follow one another."""
        return self.trades * _steps(self.ulysses) + self.hops + self.gathers * _steps(self.degree)

    @property
    def moved(self) -> float:
        """Bytes that leave a rank."""
        return self.traded * _others(self.ulysses) + self.passed + self.gathered * _others(self.degree)


def volumes(
    *,
    ulysses: int,
    ring: int,
    heads: int,
    attentions: int,
    traffic: float,
    forward: float,
    backward: float,
    output: float | None = None,
) -> Volumes:
    """Of ``forward`` forwards and ``backward`` backwards.

    ``traffic`` are the GiB of q, k, v and the output over all ``attentions`` of one forward, ``output`` the bytes of
    what the last block gives; where that is not known, those of one attention's output are taken.
    """
    degree = ulysses * ring
    if degree == 1 or not attentions:
        return Volumes(ulysses, ring)
    total = traffic * GIB
    share, passes = total / degree, forward + backward
    around = (forward + 2 * backward) * (ring - 1)  # backward also carries the gradients of keys and values
    largest = math.ceil(heads / ulysses) / heads * ulysses  # where heads do not divide, one rank trades more
    return Volumes(
        ulysses,
        ring,
        traded=passes * share * largest if ulysses > 1 else 0.0,
        trades=passes * 2 * attentions if ulysses > 1 else 0.0,
        passed=around * share / 2,
        hops=around * attentions,
        # the shards of the last block's output are gathered once, and their gradients scattered in backward
        gathered=passes * (total / (4 * attentions) if output is None else output),
        gathers=passes,
    )


def _steps(ranks: int) -> int:
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def collective_time(link: Link, size: float, ranks: int, calls: float, contention: float) -> float:
    """ms of ``calls`` collectives in which each rank moves ``size`` bytes in all, less what stays with itself."""
    inside = size * max(link.inside / link.intra, link.hosted / link.host) / 1e9
    outside = size * max(max(link.outside, link.carried) / link.inter * contention, link.shared / link.uplink) / 1e9
    steps = math.ceil(math.log2(ranks)) * calls
    return (inside + outside) * 1e3 + steps * link.latency * 1e-3


def hop_time(link: Link, size: float, calls: float, contention: float) -> float:
    """ms of one step around the ring, summed over ``calls`` attentions; the slowest hop sets the pace."""
    speed = link.inter / contention / max(1.0, link.carried) if link.outside else link.intra
    return (
        size * max(1 / speed, link.hosted / link.host, link.shared / link.uplink) / 1e9 * 1e3
        + calls * link.latency * 1e-3
    )
