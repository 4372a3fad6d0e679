"""The devices of a cluster whose nodes differ, or of which a run found some slow.

Which ranks are alike, how fast each kind is and what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from arachnec.cluster.topology import kinds_of_ranks, machine_of, machines, node_of, slowdowns_of
from arachnec.ir.nodes import Cluster


@dataclass(frozen=True)
class Devices:
    cluster: Cluster

    @cached_property
    def kinds(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each kind of device, where there are several kinds; those with most memory first."""
        kinds = kinds_of_ranks(self.cluster) if {"mixed", "slowed"} & {*self.cluster.attrs} else ()
        return kinds if len(kinds) > 1 else ()

    def like(self, rank: int) -> tuple[int, ...]:
        """The ranks whose devices are of the kind of this one's, where there are kinds."""
        return self.kinds[self._kind_of[rank]]

    def packed(self, degree: int) -> list[tuple[int, ...]]:
        """The first ``degree`` ranks of each kind that has so many, else of all kinds."""
        groups = [ranks[:degree] for ranks in self.kinds if len(ranks) >= degree]
        return groups or [tuple(sorted(rank for ranks in self.kinds for rank in ranks)[:degree])]

    def slowdown(self, ranks: tuple[int, ...] | None) -> float:
        """How much longer the slowest of these devices takes than the cluster's fastest, for which the formulas are."""
        if not self.kinds or ranks is None:
            return 1.0
        fastest = max(machine.flops for machine in machines(self.cluster))
        return fastest / min(machine_of(self.cluster, rank).flops for rank in ranks)

    def slowed(self, ranks: tuple[int, ...] | None) -> float:
        """How much longer than it should the slowest of these ranks takes, as a run found."""
        if not self.kinds or ranks is None:
            return 1.0
        slower = slowdowns_of(self.cluster)
        return max(slower.get(rank, 1.0) for rank in ranks)

    def memory_of(self, ranks: Sequence[int] | None, degree: int) -> float:
        """GiB of the least of these ranks, or of the ``degree`` ranks with most memory, where there are kinds."""
        if ranks is not None:
            return min(self._memories[self._kind_of[rank]] for rank in ranks)
        descending = (memory for memory, kind in zip(self._memories, self.kinds, strict=True) for _ in kind)
        return next(islice(descending, degree - 1, None))

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        return {rank: kind for kind, ranks in enumerate(self.kinds) for rank in ranks}

    @cached_property
    def _memories(self) -> tuple[float, ...]:
        """GiB of a device of each kind."""
        every = machines(self.cluster)
        return tuple(every[node_of(self.cluster, kind[0])].memory for kind in self.kinds)
