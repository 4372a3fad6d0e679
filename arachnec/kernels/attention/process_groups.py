"""Process groups, made once and kept."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from arachnec.kernels.attention.sequence_shard import SequenceShard, ring_positions, ulysses_positions


class ProcessGroups:
    """The process groups of a run by their ranks.

    Making a group is collective over *all* ranks of the run, members or not, so every rank calls ``ensure`` with the
    same list in the same order; using one is not. A group stays until some rank would be in more than ``most``: then
    those that were asked for longest ago are given up. So all ranks know of all groups.
    """

    def __init__(self, timeout: timedelta | None = None, *, most: int | None = None) -> None:
        self._timeout = timeout
        self._most = most
        self._groups: dict[frozenset[int], dist.ProcessGroup | None] = {}  # the last asked for last
        self.given_up = 0

    def ensure(self, wanted: Iterable[tuple[int, ...]], device: torch.device | None = None) -> None:
        """Make those of the groups that do not exist yet, and give up others where they are too many. Collective.

        With ``device`` they are made for that kind of device alone, and their members meet once: NCCL connects a group
        at its first collective, for which the host waits, and that must not be in the middle of something that a member
        waits for.
        """
        asked = [key for key in dict.fromkeys(map(frozenset, wanted)) if len(key) > 1]
        missing = [key for key in asked if key not in self._groups]
        self._give_up(too_many([*self._groups, *missing], set(asked), self._most))
        for key in asked:  # these were asked for last
            if key in self._groups:
                self._groups[key] = self._groups.pop(key)
        for batch in disjoint(missing) if _can_split(device) else ():
            self._groups |= dict.fromkeys(batch) | _split(batch, device, self._timeout)
        for key in missing:
            if key not in self._groups:
                group = dist.new_group(sorted(key), timeout=self._timeout, backend=_backend(device))
                self._groups[key] = group if dist.get_rank() in key else None
            if device is not None and dist.get_rank() in key:
                dist.all_reduce(torch.zeros(1, device=device), group=self._groups[key])
        if missing:
            # A rank's own connections may stand before those between other members do, and a member that closes its
            # own then breaks theirs.
            dist.barrier()

    def count(self) -> int:
        """How many groups this rank is in."""
        return sum(group is not None for group in self._groups.values())

    def _give_up(self, keys: Iterable[frozenset[int]]) -> None:
        """Destroy these groups. Collective."""
        keys = [key for key in keys if key in self._groups]
        if not keys:
            return
        dist.barrier()  # nobody closes what another still waits on
        for key in keys:
            group = self._groups.pop(key)
            if group is not None:
                dist.destroy_process_group(group)
        self.given_up += len(keys)

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


def too_many(keys: Sequence[frozenset[int]], needed: Set[frozenset[int]], most: int | None) -> list[frozenset[int]]:
    """Of groups in the order in which they were asked for, those to give up so that no rank is in more than ``most``.

    Those ``needed`` now stay, even where they alone are more.
    """
    if most is None:
        return []
    counts = Counter(rank for key in keys for rank in key)
    dropped = []
    for key in keys:
        if key not in needed and any(counts[rank] > most for rank in key):
            dropped.append(key)
            counts.subtract(key)
    return dropped


def disjoint(keys: Iterable[frozenset[int]]) -> list[list[frozenset[int]]]:
    """The groups in batches in which no rank is twice, each in the first that has room: one split makes a batch."""
    batches: list[list[frozenset[int]]] = []
    for key in keys:
        room = next((batch for batch in batches if all(key.isdisjoint(other) for other in batch)), None)
        if room is None:
            batches.append([key])
        else:
            room.append(key)
    return batches


def _can_split(device: torch.device | None) -> bool:
    """Whether the group of all ranks stands already and its library can split it: NCCL with ``device_id``."""
    everyone = dist.group.WORLD
    if device is None or everyone is None or everyone.bound_device_id is None:
        return False
    return bool(everyone._get_backend(device).supports_splitting)


def _split(
    batch: Sequence[frozenset[int]], device: torch.device | None, timeout: timedelta | None
) -> dict[frozenset[int], dist.ProcessGroup]:
    """The one group of the batch that this rank is in, if any, split from that of all ranks. Collective."""
    named = "backend" in inspect.signature(dist.split_group).parameters  # not by every torch; else the parent's
    name = _backend(device)
    options: dict[str, Any] = {"backend": f"{device.type}:{name}"} if named and name and device is not None else {}
    group = dist.split_group(split_ranks=[sorted(key) for key in batch], timeout=timeout, **options)
    return {key: group for key in batch if group is not None and dist.get_rank() in key}


def _backend(device: torch.device | None) -> str | None:
    """The name of that of the group of all ranks for this kind of device alone; None for all of its backends.

    A group for GPUs with a backend for CPUs beside it would have a mesh of gloo's connections, which nobody uses.
    """
    if device is None:
        return None
    return dict(pair.split(":") for pair in dist.get_backend_config().split(",")).get(device.type)
