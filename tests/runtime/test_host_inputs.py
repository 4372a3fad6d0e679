"""What blocks keep in the host's memory comes back as it went, in whatever order their inputs are asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.host_copies import APART, HostArena, HostCopies, HostInputs

BLOCKS, BYTES = 3, 8 * 4


@pytest.mark.parametrize("inputs", [1, 2, 3])
def test_inputs_of_a_block_come_back_in_the_order_it_saved_them(inputs: int) -> None:
    """As autograd asks: the last block first, and of each block its first input first. Twice, in the same buffers."""
    copies = HostCopies(DeviceRuntime.of(torch.device("cpu")))
    away = HostInputs(copies)
    for step in range(2):
        away.begin()
        values = [[torch.full((8,), 100.0 * step + 10 * block + n) for n in range(inputs)] for block in range(BLOCKS)]
        kept = [[away.put(value) for value in own] for own in values]
        for own, right in reversed(list(zip(kept, values, strict=True))):
            for handle, value in zip(own, right, strict=True):
                assert torch.equal(away.get(handle), value)
        assert copies.counted() == (BLOCKS * inputs * BYTES,) * 2  # each went once and came once
    with pytest.raises(AssertionError):
        away.get(kept[0][0])  # its buffer may hold another one


class Counted(HostCopies):
    """Notes the bytes of every buffer that was made."""

    made: list[int]

    def buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.made.append(size * dtype.itemsize)
        return super().buffer(size, dtype)


def test_clips_of_many_lengths_need_no_more_of_the_host_than_the_longest() -> None:
    copies = Counted(DeviceRuntime.of(torch.device("cpu")))
    copies.made = []
    away = HostInputs(copies)
    longest = BLOCKS * 64 * 2 * 4
    for tokens, dtype in ((8, torch.float32), (64, torch.bfloat16), (16, torch.float32), (64, torch.float32)):
        copies.reserve(longest)
        away.begin()
        values = [torch.full((tokens, 2), float(block), dtype=dtype) for block in range(BLOCKS)]
        kept = [away.put(value) for value in values]
        for handle, value in reversed(list(zip(kept, values, strict=True))):
            back = away.get(handle)
            assert back.dtype == dtype and torch.equal(back, value)
    assert copies.made == [longest + APART]


def test_what_was_reserved_too_small_is_as_large_as_needed_from_the_next_step_on() -> None:
    copies = Counted(DeviceRuntime.of(torch.device("cpu")))
    copies.made = []
    away = HostInputs(copies)
    for _ in range(3):
        copies.reserve(256)
        away.begin()
        values = [torch.full((APART // 4,), float(block)) for block in range(BLOCKS)]
        kept = [away.put(value) for value in values]
        for handle, value in reversed(list(zip(kept, values, strict=True))):
            assert torch.equal(away.get(handle), value)
    assert copies.made == [256 + APART, APART, APART, BLOCKS * APART]


@pytest.mark.parametrize("size", [1, 3, 257, 1000])
def test_what_a_plan_says_is_enough_for_inputs_of_any_size(size: int) -> None:
    """In the first step too: nothing more is locked, though parts begin at round addresses."""
    copies = Counted(DeviceRuntime.of(torch.device("cpu")))
    copies.made = []
    away = HostInputs(copies)
    copies.reserve(40 * size)
    away.begin()
    for block in range(40):
        away.put(torch.full((size,), block, dtype=torch.uint8))
    assert len(copies.made) == 1


def test_inputs_that_a_failed_step_never_asked_for_do_not_stay() -> None:
    copies = Counted(DeviceRuntime.of(torch.device("cpu")))
    copies.made = []
    away = HostInputs(copies)
    for _ in range(3):
        copies.reserve(BLOCKS * 512)
        away.begin()
        for block in range(BLOCKS):
            away.put(torch.full((128,), float(block)))
    assert copies.made == [BLOCKS * 512 + APART]


@given(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 5)), max_size=40),
)
def test_parts_that_are_lent_do_not_overlap_and_free_ones_join(steps: list[tuple[int, int]]) -> None:
    """In any order of lending and giving back; afterwards all of it can be lent at once."""
    arena = HostArena(torch.zeros(4096, dtype=torch.uint8))
    lent: list[torch.Tensor] = []
    for number, (size, back) in enumerate(steps, 1):
        part = arena.lend(size)
        if part is not None:
            assert part.numel() == size and not part.any()
            lent.append(part.fill_(number % 255 + 1))
        if back < len(lent):
            given_back = lent.pop(back)
            assert len(given_back.unique()) == 1
            first = given_back.storage_offset()
            size = given_back.numel()
            given_back.zero_()
            arena.give_back(first, size)
    for part in lent:
        arena.give_back(part.storage_offset(), part.numel())
    assert arena.lend(4096) is not None
