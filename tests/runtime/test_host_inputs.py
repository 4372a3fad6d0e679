"""What blocks keep in the host's memory comes back as it went, in whatever order their inputs are asked for."""

from __future__ import annotations

import pytest
import torch

from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.host_copies import HostCopies
from arachnec.runtime.host_inputs import HostInputs

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
    for tokens, dtype in ((8, torch.float32), (64, torch.bfloat16), (16, torch.float32), (64, torch.float32)):
        away.begin()
        values = [torch.full((tokens, 2), float(block), dtype=dtype) for block in range(BLOCKS)]
        kept = [away.put(value) for value in values]
        assert len({buffer.data_ptr() for buffer, _ in copies._free}) == len(copies._free)
        for handle, value in reversed(list(zip(kept, values, strict=True))):
            back = away.get(handle)
            assert back.dtype == dtype and torch.equal(back, value)
    assert sorted(buffer.numel() for buffer, _ in copies._free) == [64 * 2 * 4] * BLOCKS
    assert copies.made == [8 * 2 * 4] * BLOCKS + [64 * 2 * 2] * BLOCKS + [64 * 2 * 4] * BLOCKS
