"""Page-locked memory of the host, as much as is asked for and no more.

Every buffer has pages of its own: the driver locks whole pages, and may refuse one that another buffer has locked. They
are unlocked before the memory goes back to the system; else the driver would take for locked what comes to lie there.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from arachnec.ir.diagnostic import Diagnostic, UserError

GIB = 2**30
PORTABLE = 1  # cudaHostRegisterPortable: locked for all contexts


@dataclass(frozen=True)
class CannotLock(Diagnostic):
    title: ClassVar[str] = "the host gives no {gib:.2f} GiB more of page-locked memory"
    help: ClassVar[str] = "lower `host_memory` of the cluster to what this machine has to spare, and compile again"
    gib: float


class _Pages(mmap.mmap):
    """Pages, unlocked when nobody has them any more and before they go."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


def locked_buffer(
    size: int, dtype: torch.dtype, lock: Callable[[int, int, int], object], unlock: Callable[[int], object]
) -> Tensor:
    """A flat tensor of ``size`` elements. ``lock`` is given address, bytes and flags, and returns 0 where it worked;
    ``unlock`` the address, once nobody has the tensor. Raises ``UserError`` where the host has no more to lock."""
    wanted = size * dtype.itemsize
    if not wanted:
        return torch.empty(0, dtype=dtype)
    length = math.ceil(wanted / mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _Pages(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=dtype, count=size)
    address = buffer.data_ptr()
    if int(lock(address, length, PORTABLE)):  # type: ignore[call-overload]
        raise UserError(CannotLock(None, wanted / GIB))
    pages.unlock = lambda: unlock(address)
    return buffer
