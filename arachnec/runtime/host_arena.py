"""One page-locked buffer of the host, of which parts are lent: locking another in a step would wait for the device.

A call that locks memory returns only when every kernel of the device has ended, also a collective that waits for its
peers. So what a program needs is locked before its first step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from torch import Tensor

ALIGNED = 256  # bytes, as the device's copies like them


@dataclass
class HostArena:
    """``memory`` is flat, of bytes. Parts are lent from where the first of enough bytes is free."""

    memory: Tensor
    _free: list[tuple[int, int]] = field(init=False)  # first byte and one behind the last, ascending

    def __post_init__(self) -> None:
        self._free = [(0, self.memory.numel())] if self.memory.numel() else []

    def lend(self, size: int) -> Tensor | None:
        """So many bytes; None where no free part is that large."""
        taken = aligned(size)
        for number, (first, end) in enumerate(self._free):
            if end - first >= taken:
                self._free[number : number + 1] = [(first + taken, end)] if end - first > taken else []
                return self.memory[first : first + size]
        return None

    def give_back(self, first: int, size: int) -> None:
        """The part that begins at byte ``first``; joined with its free neighbours."""
        end = first + aligned(size)
        insort(self._free, (first, end))
        place = bisect_left(self._free, (first, end))
        if place + 1 < len(self._free) and self._free[place + 1][0] == end:
            self._free[place : place + 2] = [(first, self._free[place + 1][1])]
        if place and self._free[place - 1][1] == first:
            self._free[place - 1 : place + 1] = [(self._free[place - 1][0], self._free[place][1])]


def aligned(size: int) -> int:
    """Bytes that a part of ``size`` takes."""
    return -(-size // ALIGNED) * ALIGNED
