"""What a rank knows of the others: their processes, where they stood last, and which of them are gone.

They tell it in the rendezvous store, those of its own agent in memory of the host, too.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from arachnec.ir.diagnostic import Mistake
from arachnec.launch.phases import Place, open_memory, read_place

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class Member(msgspec.Struct, frozen=True):
    """A rank's process."""

    rank: int
    host: str
    pid: int
    agent: str  # processes of one agent see each other's ids
    place: int = -1  # the descriptor under which it notes where it is

    @classmethod
    def here(cls, rank: int, place: int = -1) -> Member:
        host = socket.gethostname()
        try:
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:
            space = ""
        return cls(rank, host, os.getpid(), f"{host}:{space}:{os.getppid()}", place)

    def alive(self) -> bool:
        """Whether the process exists; asked by its siblings only."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True


def rank_gone(member: Member, world: int, what: str, last: str) -> Mistake:
    return Mistake(
        None,
        f"rank {member.rank} of {world} on host {member.host} {what}; the others were stopped{last}",
        help="the output of that host says more; if the system was out of memory, use fewer ranks or smaller clips",
    )


@dataclass
class _Beats:
    """When the counter of the next rank was last seen to change."""

    text: str = ""
    changed: float = field(default_factory=time.monotonic)

    def silent_for(self, text: str) -> float:
        now = time.monotonic()
        if text != self.text:
            self.text, self.changed = text, now
        return now - self.changed


class Peers:
    """The ranks of a run, to ``me``."""

    def __init__(self, store: Store, me: Member, world: int) -> None:
        self._store, self._me, self._world = store, me, world
        self._members: dict[int, Member] = {}
        self._memories: dict[int, int] = {}  # of siblings' last places, by rank
        self._beats = _Beats()

    @property
    def all_known(self) -> bool:
        return len(self._members) == self._world

    @property
    def of_several_agents(self) -> bool:
        """Whether they are; where that is not known, too."""
        return len({member.agent for member in self._members.values()}) != 1

    @property
    def first_is_sibling(self) -> bool:
        """Whether rank 0, which may keep the store, is of this agent, or is this rank."""
        return 0 in self._members and self._members[0].agent == self._me.agent

    def close(self) -> None:
        for descriptor in self._memories.values():
            os.close(descriptor)

    def siblings(self) -> list[Member]:
        """The other ranks of this agent, once all ranks have told who they are."""
        if not self.all_known:
            keys = [f"member/{rank}" for rank in range(self._world)]
            if not self._store.check(keys):
                return []
            members = [msgspec.json.decode(data, type=Member) for data in self._store.multi_get(keys)]
            self._members.update((member.rank, member) for member in members)
            self._memories = _memories(self.known_siblings())
        return self.known_siblings()

    def known_siblings(self) -> list[Member]:
        """As far as they are known without the store."""
        return [member for member in self._members.values() if member.agent == self._me.agent and member != self._me]

    def gone(self) -> Member | None:
        """A rank of this agent whose process is there no more, and that had not done its work."""
        for member in self.siblings():
            if not member.alive() and not self._store.check([f"done/{member.rank}"]):
                return member
        return None

    def silent(self, lapse_of: Callable[[Place], float]) -> tuple[Member | None, float]:
        """The next rank, if it beats no more for longer than it may where it stands, and for how long."""
        following = (self._me.rank + 1) % self._world
        if following == self._me.rank or not self._store.check([f"at/{following}"]):
            return None, 0.0
        told = self._store.get(f"at/{following}").decode()
        silence = self._beats.silent_for(told)
        if silence < lapse_of(msgspec.json.decode(told, type=Place)) or self._store.check([f"done/{following}"]):
            return None, silence
        return msgspec.json.decode(self._store.get(f"member/{following}"), type=Member), silence

    def last_of(self, rank: int) -> str:
        """What a rank of this host was in last, to the instruction; empty for one of another host."""
        memory = self._memories.get(rank)
        place = None if memory is None else read_place(memory)
        return "" if place is None else f"; it was in {place.text()}"

    def places(self, ranks: Iterable[int]) -> dict[int, Place]:
        """Where these ranks stood last, as far as they have told."""
        known = [rank for rank in ranks if self._store.check([f"at/{rank}"])]
        told = self._store.multi_get([f"at/{rank}" for rank in known]) if known else []
        return {rank: msgspec.json.decode(text, type=Place) for rank, text in zip(known, told, strict=True)}


def _memories(members: Iterable[Member]) -> dict[int, int]:
    """The memories of these ranks' last places that can be opened, by rank."""
    opened = {member.rank: open_memory(member.pid, member.place) for member in members if member.place >= 0}
    return {rank: memory for rank, memory in opened.items() if memory is not None}
