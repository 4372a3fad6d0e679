"""Page-locked buffers: whole pages of their own, unlocked once nobody has them."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from arachnec.ir.diagnostic import UserError
from arachnec.runtime.locked_memory import locked_buffer


class Driver:
    """Refuses, as CUDA's may, to lock a page twice, and part of one."""

    def __init__(self, most: int = 2**62) -> None:
        self.locked: dict[int, int] = {}
        self.most = most

    def lock(self, address: int, size: int, flags: int) -> int:
        if address % mmap.PAGESIZE or size % mmap.PAGESIZE or sum(self.locked.values()) + size > self.most:
            return 1
        if any(first < address + size and address < first + length for first, length in self.locked.items()):
            return 712
        self.locked[address] = size
        return 0

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_small_buffers_have_pages_of_their_own_and_all_their_elements() -> None:
    driver = Driver()
    buffers = [locked_buffer(size, torch.bfloat16, driver.lock, driver.unlock) for size in (1, 3, 2048, 2049, 5)]
    assert [len(buffer) for buffer in buffers] == [1, 3, 2048, 2049, 5]
    assert len(driver.locked) == 5
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [buffer.float().mean().item() for buffer in buffers] == [0, 1, 2, 3, 4]


def test_a_buffer_is_unlocked_when_the_last_view_of_it_has_gone() -> None:
    driver = Driver()
    view = locked_buffer(100, torch.float32, driver.lock, driver.unlock)[10:20].view(2, 5)
    gc.collect()
    assert driver.locked
    view.zero_()
    del view
    gc.collect()
    assert not driver.locked


def test_no_elements_lock_nothing() -> None:
    assert len(locked_buffer(0, torch.float32, Driver(0).lock, Driver().unlock)) == 0


def test_a_host_without_more_to_lock_says_how_much_was_asked_for() -> None:
    driver = Driver(most=2**20)
    with pytest.raises(UserError, match=r"gives no 0\.50 GiB more"):
        locked_buffer(2**27, torch.float32, driver.lock, driver.unlock)
    assert not driver.locked
