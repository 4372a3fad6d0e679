"""Page-locked memory of the host, which a device copies from and to without anybody waiting.

torch's own comes in powers of two. What is locked here is as large as it has to be, and lies in pages of its own: a
page can be locked once only, and small pieces of the heap share theirs.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Pages that are unlocked before they go back to the system: a weak reference would hear of it behind that, when
    something else may lie there."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None and not sys.is_finalizing():
            self.unlock()


def locked_tensor(size: int, dtype: torch.dtype, cudart: Any) -> Tensor | None:
    """A flat tensor of ``size`` elements, not zero, unlocked when its memory is given back; None where the host has no
    more to lock. ``cudart`` is torch's module of that name."""
    pages = _Pages(-1, size * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # these may be huge
    values = torch.frombuffer(pages, dtype=dtype, count=size)
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, len(pages), 0)):
        return None
    pages.unlock = lambda: cudart.cudaHostUnregister(address)
    return values
