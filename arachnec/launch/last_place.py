"""Where a rank was last, in memory that outlives its process.

A rank writes down every instruction before it begins it. Who finds its process gone reads what is there: a sibling of
the same host through ``/proc``, which it opens while the rank lives, and ``arachnec run`` in the file that it gave to
the rank. The memory has no name, so nothing is left of it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

import msgspec

from arachnec.launch.progress import Place

PLACE_FD = "ARACHNEC_PLACE_FD"  # an open file of the launcher, where the rank writes its places
SIZE = 4096
LONGEST = 600  # characters of what a rank does


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
