"""Page-locked memory of the host, which a device copies from and to without anybody waiting.

torch's own comes in powers of two. What is locked here is as large as it has to be, and lies in pages of its own: a
page can be locked once only, and small pieces of the heap share theirs.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor


def locked_tensor(size: int, dtype: torch.dtype, cudart: Any) -> Tensor | None:
    """A flat tensor of ``size`` elements, not zero, unlocked when its memory is given back; None where the host has no
    more to lock. ``cudart`` is torch's module of that name."""
    pages = mmap.mmap(-1, size * dtype.itemsize)
    values = torch.frombuffer(pages, dtype=dtype, count=size)
    address = values.data_ptr()
    if int(cudart.cudaHostRegister(address, len(pages), 0)):
        return None
    weakref.finalize(pages, cudart.cudaHostUnregister, address).atexit = False
    return values
