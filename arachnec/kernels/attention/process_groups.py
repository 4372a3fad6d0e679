"""Process groups, made once and kept."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from arachnec.kernels.attention.sequence_shard import SequenceShard, ring_positions, ulysses_positions


def subgroups(ranks: tuple[int, ...], ulysses: int, ring: int) -> tuple[tuple[int, ...], ...]:
    """Every group that a cascade on ``ranks`` with this grid communicates in, the single ranks left out."""
    degree = len(ranks)
    wanted = [
        ranks,
        *(tuple(ranks[p] for p in ulysses_positions(i, ulysses)) for i in range(0, degree, ulysses)),
        *(tuple(ranks[p] for p in ring_positions(i, ulysses, ring)) for i in range(ulysses)),
    ]
    return tuple(dict.fromkeys(group for group in wanted if len(group) > 1))


class ProcessGroups:
    """The process groups of a run by their ranks.

    Making a group is collective over *all* ranks of the run, members or not, so every rank calls ``ensure`` with the
    same list in the same order; using one is not.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._groups: dict[frozenset[int], dist.ProcessGroup | None] = {}

    def ensure(self, wanted: Iterable[tuple[int, ...]], device: torch.device | None = None) -> None:
        """Make those of the groups that do not exist yet. Collective.

        With ``device`` their members meet once: NCCL connects a group at its first collective, for which the host
        waits, and that must not be in the middle of something that a member waits for.
        """
        missing = [key for key in dict.fromkeys(map(frozenset, wanted)) if len(key) > 1 and key not in self._groups]
        for key in missing:
            group = dist.new_group(sorted(key), timeout=self._timeout)
            self._groups[key] = group if dist.get_rank() in key else None
            if device is not None and dist.get_rank() in key:
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        if missing:
            # A rank's own connections may stand before those between other members do, and a member that closes its
            # own then breaks theirs.
            dist.barrier()

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks, in whatever order; None for a single rank.

        Raises KeyError where it was never made, ValueError where this rank is not in it.
        """
        if len(ranks) == 1:
            return None
        if frozenset(ranks) not in self._groups:
            raise KeyError(f"no group was made of ranks {ranks}")
        group = self._groups[frozenset(ranks)]
        if group is None:
            raise ValueError(f"rank {dist.get_rank()} is not one of {ranks}")
        return group

    def shard(self, ranks: tuple[int, ...], tokens: tuple[int, ...], ulysses: int, ring: int) -> SequenceShard:
        """This rank's view of a cascade on ``ranks``, whose ``subgroups`` exist."""
        index = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        heads = tuple(ranks[p] for p in ulysses_positions(index, ulysses))
        ring_ranks = tuple(ranks[p] for p in ring_positions(index, ulysses, ring))
        return SequenceShard(
            ranks, index, tokens, ulysses, ring, self.get(ranks), self.get(heads), self.get(ring_ranks)
        )

    def close(self) -> None:
        """Destroy the groups. Every rank closes when it needs none of them any more."""
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()
