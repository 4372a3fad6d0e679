"""Where ranks stand in a run, as they tell each other in the rendezvous store, and who holds up whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec


class Position(NamedTuple):
    """An instruction of a rank's program in a step, by its number. What a rank has come to only grows."""

    step: int
    instruction: int


START = Position(-1, -1)


class Place(msgspec.Struct, frozen=True):
    """Where one rank stands. ``count`` grows with every beat: a rank that stands still is told from a dead one."""

    count: int = 0
    phase: str = ""
    line: str = ""  # of this package, that the training thread is in
    position: Position = START
    doing: str = ""  # the instruction, its cascade and clips; empty between steps
    seconds: float = 0.0  # that it has been doing this
    limit: float | None = None  # in seconds, on doing this

    def text(self) -> str:
        doing = f"{self.phase}: {self.doing}" if self.doing else self.phase
        return f"{doing}, {self.line}" if self.line else doing


class Progress(Protocol):
    """What a rank does in the phase that it is in. Any thread may ask."""

    def place(self) -> Place:
        """Its position, what it is doing, for how long, and how long that may take."""
        ...

    def tell(self, to: Callable[[Place], None]) -> None:
        """From now on tell ``to`` of every instruction that the rank comes to, before it begins it."""
        ...

    def awaited(self, rank: int, position: Position) -> Mapping[int, Position]:
        """What ``rank`` waits for at ``position``: the positions that other ranks must have come to."""
        ...

    def work(self, rank: int, until: Position | None) -> str:
        """What ``rank`` has to do in this step up to a position, or in all of it, in words."""
        ...


def behind(awaited: Mapping[int, Position], places: Mapping[int, Place]) -> list[int]:
    """The ranks that have not come to where they are awaited; one that has told no place is among them."""
    return [rank for rank, position in awaited.items() if rank not in places or places[rank].position < position]


def held_up_by(
    rank: int, places: Mapping[int, Place], awaited: Callable[[int, Position], Mapping[int, Position]]
) -> int:
    """The rank that ``rank`` waits for in the end, which may be itself: one that waits for nobody who is behind."""
    passed: set[int] = set()
    while rank not in passed and rank in places:
        passed.add(rank)
        late = behind(awaited(rank, places[rank].position), places)
        if not late:
            return rank
        rank = min(late, key=lambda other: places[other].position if other in places else START)
    return rank
