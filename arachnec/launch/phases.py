"""The phases of a run: where a rank stands in one, what it leaves of that when it dies, and how long it may stay there.

Ranks tell each other where they stand in the rendezvous store. A rank also writes down every instruction before it
begins it, in memory that outlives its process and has no name, so nothing is left of it. What is there is read when
its process is gone: by a sibling of the same host through ``/proc``, which it opens while the rank lives, and by
``arachnec run`` in the file that it gave to the rank.

Each limit follows from what the phase has to do; an option sets it instead. The watchdog keeps them, so that they say
which phase it was; the timeouts of process groups lie far behind, where no healthy run comes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import msgspec

from arachnec.ir.nodes import Module, quantity
from arachnec.launch.environment import PLACE_FD

SIZE = 4096
LONGEST = 600  # characters of what a rank does
GROUP_TIMEOUT = timedelta(days=1)
START_S = 600.0
PLAN_S = 600.0
STEP_S = 60.0
STALL_S = 60.0
STEPS_OF_ANOTHER_DEVICE_S = 600.0  # where planned times do not apply
MOST_PLANNED_S = 600.0  # of an instruction, until a step has taken longer: a plan is a claim
LONGER = 10.0  # than planned, or than measured before, is too long
DISK = 0.1  # GiB/s: a slow shared file system that is read or hashed
WRITES = 0.5  # GiB/s of a rank that writes a checkpoint, by which a grace is estimated
ENDS_S = 5.0  # that ranks take to end


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


class Enter(Protocol):
    """Says which phase the run is in now, for how many seconds at most, the option that sets this limit, and what the
    rank does in it."""

    def __call__(
        self, phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None
    ) -> None: ...


def unwatched(phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None) -> None:
    """Nobody minds how long a phase takes."""


def new_memory() -> int:
    """A descriptor of memory for the places of one rank."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("arachnec-place")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class LastPlace:
    """The memory of this rank: the launcher's, where there is one."""

    def __init__(self) -> None:
        given = os.environ.get(PLACE_FD)
        self.descriptor = int(given) if given else new_memory()
        self._own = given is None

    def note(self, place: Place) -> None:
        """This rank has come to a place. It costs microseconds."""
        if len(place.doing) > LONGEST:
            place = msgspec.structs.replace(place, doing=place.doing[:LONGEST] + "...")
        with contextlib.suppress(OSError):  # for a message that may never be needed
            os.pwrite(self.descriptor, msgspec.json.encode(place).ljust(SIZE), 0)

    def close(self) -> None:
        if self._own:
            os.close(self.descriptor)


def open_memory(pid: int, descriptor: int) -> int | None:
    """The memory of a rank of this host that is alive; None where the system does not give it."""
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
    except OSError:
        return None


def read_place(descriptor: int) -> Place | None:
    """What the rank noted last; None where it noted nothing."""
    try:
        return msgspec.json.decode(os.pread(descriptor, SIZE, 0), type=Place)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


@dataclass(frozen=True)
class Timeouts:
    """None: derived from the plan."""

    start: float | None = None
    plan: float | None = None
    step: float | None = None
    stall: float | None = None

    def of_start(self, module: Module) -> float:
        """To read or write weights and hash them, and to make process groups."""
        if self.start is not None:
            return self.start
        states = [quantity(program.attrs["state"]) for program in module.programs if "state" in program.attrs]
        return START_S + sum(states) / DISK

    def grace(self, module: Module, step_ms: float) -> float:
        """To end after the step under way, and to write a checkpoint: an estimate."""
        states = [quantity(program.attrs["state"]) for program in module.programs if "state" in program.attrs]
        return step_ms / 1e3 + max(states, default=0.0) / WRITES + ENDS_S

    def of_plan(self, planning_ms: float | None = None) -> float:
        """``planning_ms``: what planning took when the executable was compiled; None where that is not known, or was
        for other ranks."""
        if self.plan is not None:
            return self.plan
        return PLAN_S if planning_ms is None else STEP_S + LONGER * planning_ms / 1e3

    def of_step(self, planned_ms: float, longest_ms: float, *, first: float = 0.0, applies: bool = True) -> float:
        """``longest_ms``: of the steps before; ``first``: what compiling may add to a plan's first step."""
        if self.step is not None:
            return self.step + first
        least = STEP_S if applies else STEPS_OF_ANOTHER_DEVICE_S
        return max(least, LONGER * max(planned_ms, longest_ms) / 1e3) + first

    def of_instruction(
        self, planned_ms: float, longest_ms: float, ends_ms: float, *, first: float = 0.0, applies: bool = True
    ) -> float:
        """``longest_ms``: of the steps before, which were planned to end after ``ends_ms``; ``first`` as above.

        What the plan says counts, as much longer as the steps took than planned, up to ten minutes or such a step.
        """
        least = self.stall if self.stall is not None else STALL_S if applies else STEPS_OF_ANOTHER_DEVICE_S
        slower = max(1.0, longest_ms / ends_ms) if ends_ms else 1.0
        return least + min(slower * planned_ms / 1e3, max(MOST_PLANNED_S, longest_ms / 1e3)) + first
