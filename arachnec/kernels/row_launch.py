"""How many warps, buffers and programs a kernel over rows is given: from the row's size and the device's limits.

Every number here follows from counting registers and shared memory; ``benchmarks/kernels.py --tune`` searches around it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from arachnec.kernels.row_groups import RowGroups
from arachnec.kernels.row_tiles import column_sums

LARGEST_ROW = 8192
WIDEST = 4  # lanes of a tile per thread: 8 bytes of bf16, 16 of fp32
OTHER_REGISTERS = 36  # addresses, loop counters, the reduction
MOST_REGISTERS = 168  # a thread's, from where on fewer than 12 warps fit a multiprocessor
SUM_ROWS, SUM_COLUMNS = 64, 32


@dataclass(frozen=True)
class Device:
    """What the launch depends on; the defaults are an H100's and an H200's."""

    multiprocessors: int = 132
    registers: int = 65536  # 32-bit ones of a multiprocessor
    threads: int = 2048  # of a multiprocessor
    shared: int = 232448 - 4096  # bytes a program may use, less what reductions need


@dataclass(frozen=True)
class Launch:
    """Tile in lanes, warps of a program, buffers of its loop (1: not pipelined), programs in all at a time."""

    tile: int
    warps: int
    stages: int
    slots: int


def device_of(tensor: Tensor) -> Device:
    return _device(tensor.device.index or 0) if tensor.device.type == "cuda" else Device()


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        properties.multi_processor_count,
        properties.regs_per_multiprocessor,
        properties.max_threads_per_multi_processor,
        getattr(properties, "shared_memory_per_block_optin", 99 * 1024) - 4096,
    )


def tile_of(size: int) -> int:
    """Lanes of a tile: of the powers of two that need at most 8 tiles, the one with the fewest idle lanes (the widest)."""
    if not 0 < size <= LARGEST_ROW:
        raise ValueError(f"rows of {size} values; the kernels take 1 to {LARGEST_ROW}")
    widths = [1 << k for k in range(4, 12) if math.ceil(size / (1 << k)) <= 8]
    return min(widths, key=lambda width: (math.ceil(size / width) * width, -width))


def launch_of(size: int, vectors: int, inputs: int, itemsize: int, device: Device, waves: int = 1) -> Launch:
    """For rows of ``size`` lanes with ``vectors`` of them live in fp32 registers and ``inputs`` read in each step."""
    tile = tile_of(size)
    lanes = math.ceil(size / tile) * tile
    warps = max(1, tile // (32 * WIDEST))
    while warps < 16 and vectors * lanes // (32 * warps) + OTHER_REGISTERS > MOST_REGISTERS:
        warps *= 2
    registers = min(255, vectors * lanes // (32 * warps) + OTHER_REGISTERS)
    resident = max(1, min(device.registers // (32 * warps * registers), device.threads // (32 * warps), 16))
    buffer = inputs * lanes * itemsize * resident
    stages = next((stages for stages in (3, 2) if (stages - 1) * buffer <= device.shared), 1)
    return Launch(tile, warps, stages, device.multiprocessors * resident * waves)


def sum_partials(partials: Tensor, groups: RowGroups, run: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    """Sums, each [groups.loops, H], of partials [programs, K, H], in a fixed order: the second stage of column sums.

    ``dtypes``: of the K <= 3 sums. They share no storage, as results of operators must not.
    """
    hidden = partials.shape[2]
    sums = tuple(torch.empty(groups.loops, hidden, dtype=dtype, device=partials.device) for dtype in dtypes)
    if sums and hidden and groups.loops:
        grid = (groups.loops, triton.cdiv(hidden, SUM_COLUMNS), len(dtypes))
        column_sums[grid](
            partials, *sums, *(None for _ in range(3 - len(sums))), groups.lengths, groups.loops, groups.group_rows, run,
            KINDS=len(sums), H=hidden, SEGMENTS=groups.segments, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=4,
        )  # fmt: skip
    return sums
