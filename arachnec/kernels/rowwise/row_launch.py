"""How many warps, buffers and programs a kernel over rows is given: from the row's size and the device's limits.

Every number here follows from counting registers and shared memory; ``benchmarks/kernels --tune`` searches
around it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from arachnec.kernels.rowwise.row_groups import RowGroups
from arachnec.kernels.rowwise.row_tiles import column_sums

LARGEST_ROW = 8192
WIDEST = 4  # lanes of a tile per thread: 8 bytes of bf16, 16 of fp32
OTHER_REGISTERS = 28  # a thread's: addresses, loop counters, the reduction
LEAST_WARPS = 16  # of a multiprocessor, so that one program's reductions hide behind another's loads
WAVES = 4  # programs for each that runs at a time, at most
LEAST_ROWS = 8  # of a program, before there are more than run at a time: each reads its group's vectors first
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 128, 32, 8
TILE, TILE_WARPS, RESIDENT = 512, 4, 4  # of a kernel that reduces nothing along a row; programs of a multiprocessor


@dataclass(frozen=True)
class Device:
    """What the launch depends on; the defaults are an H100's and an H200's."""

    multiprocessors: int = 132
    registers: int = 65536  # 32-bit ones of a multiprocessor
    threads: int = (
        1024  # of a multiprocessor that are put to use: half of them saturate the memory, with 64 registers each
    )
    shared: int = 232448 - 4096  # bytes a program may use, less what reductions need


@dataclass(frozen=True)
class Launch:
    """Tile in lanes, warps of a program, buffers of its loop (1: not pipelined), registers a thread may use, and how
    many programs there should be: as many as run at a time, times the waves."""

    tile: int
    warps: int
    stages: int
    registers: int
    slots: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "maxnreg": self.registers}


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def device_of(tensor: Tensor) -> Device:
    return _device(tensor.device.index or 0) if tensor.device.type == "cuda" else Device()


@functools.cache
def _device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(
        properties.multi_processor_count,
        getattr(properties, "regs_per_multiprocessor", 65536),
        properties.max_threads_per_multi_processor // 2,
        getattr(properties, "shared_memory_per_block_optin", 99 * 1024) - 4096,
    )


def tile_of(size: int) -> int:
    """Lanes of a tile: of the powers of two that need at most 8 tiles, the widest with the fewest idle lanes."""
    if not 0 < size <= LARGEST_ROW:
        raise ValueError(f"rows of {size} values; the kernels take 1 to {LARGEST_ROW}")
    widths = [1 << k for k in range(4, 12) if math.ceil(size / (1 << k)) <= 8]
    return min(widths, key=lambda width: (math.ceil(size / width) * width, -width))


def launch_of(size: int, vectors: int, inputs: int, itemsize: int, device: Device, rows: int = 0) -> Launch:
    """For rows of ``size`` lanes with ``vectors`` of them live in fp32 registers and ``inputs`` read in each step.

    With ``rows``, the number of them, up to WAVES times as many programs as run at a time: where a program writes no
    partials, that evens out the multiprocessors for nothing.
    """
    tile = tile_of(size)
    lanes = math.ceil(size / tile) * tile
    return launch_of_tiles(tile, lanes, vectors, inputs * lanes * itemsize, device, rows)


def launch_of_tiles(tile: int, lanes: int, vectors: int, read: int, device: Device, rows: int = 0) -> Launch:
    """As ``launch_of``, of rows that take ``lanes`` lanes in tiles, and ``read`` bytes in each step."""
    warps = max(1, tile // (32 * WIDEST))

    def resident() -> int:
        registers = vectors * lanes // (32 * warps) + OTHER_REGISTERS
        return min(device.registers // (32 * warps * registers), device.threads // (32 * warps), 16)

    while warps < 16 and resident() * warps < LEAST_WARPS:
        warps *= 2
    programs = max(1, resident())
    registers = min(255, device.registers // (32 * warps * programs) // 8 * 8)
    buffer = read * programs
    stages = next((stages for stages in (3, 2) if (stages - 1) * buffer <= device.shared), 1)
    slots = device.multiprocessors * programs
    return Launch(tile, warps, stages, registers, slots * max(1, min(WAVES, rows // (slots * LEAST_ROWS))))


def column_launch(rows: Tensor) -> Launch:
    """Of a kernel that takes a tile of columns through a run of rows."""
    columns = math.ceil(rows.shape[1] / TILE)
    return Launch(TILE, TILE_WARPS, 3, 128, max(1, device_of(rows).multiprocessors * RESIDENT // columns))


def sum_partials(partials: Tensor, groups: RowGroups, run: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    """Sums, each [groups.loops, H], of partials [programs, K, H], in a fixed order: the second stage of column sums.

    ``dtypes``: of the K <= 3 sums. They share no storage, as results of operators must not.
    """
    hidden = partials.shape[2]
    sums = tuple(torch.empty(groups.loops, hidden, dtype=dtype, device=partials.device) for dtype in dtypes)
    if sums and hidden and groups.loops:
        grid = (groups.loops, triton.cdiv(hidden, SUM_COLUMNS), len(dtypes))
        column_sums[grid](
            partials, *sums, *(None for _ in range(3 - len(sums))),
            groups.lengths, groups.loops, groups.group_rows, run,
            KINDS=len(sums), H=hidden, SEGMENTS=groups.segments, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS,
            num_warps=SUM_WARPS,
        )  # fmt: skip
    return sums
