"""Locked memory lies in pages of its own, whatever its size, and is unlocked when nobody has it any more."""

from __future__ import annotations

import gc
import mmap
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from arachnec.runtime.device_runtime import locked_tensor


@dataclass
class Cudart:
    """Refuses, as CUDA does, to lock a page twice, or more than it has."""

    most: int = 1 << 20
    locked: dict[int, int] = field(default_factory=dict)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = {page for first, length in self.locked.items() for page in pages_of(first, length)}
        if pages & set(pages_of(address, size)) or sum(self.locked.values()) + size > self.most:
            return 1
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert mapped(address), "what is unlocked is there no more"
        del self.locked[address]
        return 0


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    rows = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in rows)


def pages_of(address: int, size: int) -> range:
    return range(address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE + 1)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is mapped")
def test_many_small_tensors_are_locked_each_in_pages_of_its_own_and_unlocked_with_their_last_view() -> None:
    cudart = Cudart()
    tensors = [locked_tensor(size, dtype, cudart) for size in (1, 3, 5000) for dtype in (torch.bfloat16, torch.float32)]
    assert len(cudart.locked) == 6
    for number, values in enumerate(tensors):
        assert values is not None
        values.fill_(number)
    assert [float(values.float().mean()) for values in tensors if values is not None] == [0, 1, 2, 3, 4, 5]
    view = tensors[-1].view(2, -1)[1]  # type: ignore[union-attr]
    del tensors, values
    gc.collect()
    assert len(cudart.locked) == 1 and view.mean() == 5
    del view
    gc.collect()
    assert not cudart.locked


def test_there_is_none_where_the_host_has_no_more_to_lock() -> None:
    cudart = Cudart(most=159)
    kept = locked_tensor(10, torch.float64, cudart)
    assert kept is not None
    assert locked_tensor(10, torch.float64, cudart) is None
