"""Launches of the Triton kernels over lists of key blocks. In: heads, lists, cubes. Out: what the operator gives.

Captions' queries are a last group, whose lists name every block. So lists are extended here, and the lists of readers
of each block are made: by sorting, not by counting with atomics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.block_rows import attention_forward, key_gradients, query_gradients

CHUNK = 64  # columns of 32-bit heads that scores are summed up from at a time: more spill on an H100


@dataclass(frozen=True)
class Tile:
    """Rows and columns of scores that a program holds at a time, and its warps."""

    queries: int
    keys: int
    warps: int


def tile_of(size: int, dtype: torch.dtype) -> Tile:
    """Of 16-bit heads the largest tried that does not spill on an H100 (``benchmarks/sparse/compiled.py``)."""
    if dtype.itemsize == 4 or size > 128:
        return Tile(16, 16, 8)
    return Tile(64, 64, 4) if size <= 64 else Tile(64, 32, 8)


@dataclass(frozen=True)
class Lists:
    """Lists of all queries, captions' among them, and for each block the groups that read it.

    ``starts`` [B * H * G + 1] and ``reader_starts`` [B * H * N + 1] int64; ``tiles`` are places of the first query of
    each tile of a group.
    """

    indices: Tensor
    starts: Tensor
    readers: Tensor
    reader_starts: Tensor
    groups: Tensor
    tiles: Tensor
    tile_groups: Tensor
    longest: int  # queries of the largest group


def lists_of(indices: Tensor, counts: Tensor, groups: Tensor, blocks: Tensor, total: int, queries: int) -> Lists:
    """``groups`` and ``blocks`` are on the host, so that nothing waits for a device."""
    device, count = counts.device, len(blocks) - 1
    clips, heads, listed = counts.shape
    lengths = counts.view(-1, listed).long()
    owner = _repeated(torch.arange(counts.numel(), device=device), lengths.view(-1), len(indices))
    head, group = owner // listed, owner % listed
    if int(groups[-1]) < total:
        every = torch.arange(clips * heads, device=device)
        head = torch.cat([head, every.repeat_interleave(count)])
        group = torch.cat([group, torch.full((clips * heads * count,), listed, device=device)])
        indices = torch.cat([indices, torch.arange(count, device=device, dtype=indices.dtype).repeat(clips * heads)])
        lengths = torch.cat([lengths, lengths.new_full((clips * heads, 1), count)], 1)
        groups = torch.cat([groups, groups.new_full((1,), total)])
    here = len(groups) - 1
    by_group = (head * here + group).argsort(stable=True)
    reading = ((head * count + indices) * here + group).sort(stable=True)
    every_block = torch.arange(clips * heads * count + 1, device=device)
    reader_starts = torch.searchsorted(reading.values, every_block * here)
    tiles = -(-groups.diff() // queries)
    tile_groups = torch.repeat_interleave(torch.arange(here, dtype=torch.int32), tiles)
    within = torch.arange(len(tile_groups)) - _starts(tiles)[:-1].repeat_interleave(tiles)
    first = groups[:-1].repeat_interleave(tiles) + within * queries
    return Lists(
        indices[by_group].int(),
        _starts(lengths.view(-1)),
        group[reading.indices].int(),
        reader_starts,
        on_device(groups.int(), device),
        on_device(first.int(), device),
        on_device(tile_groups, device),
        int(groups.diff().amax()),
    )


def _repeated(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Each value as often as it is counted; their total is given, so that nobody waits to know it."""
    return torch.repeat_interleave(values, counts, output_size=total)


def launch_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lists: Lists, order: Tensor, blocks: Tensor,
    scale: float, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, S, D] and log-sum-exp [B, H, S] of heads of one size."""
    clips, heads, tokens, _ = query.shape
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=torch.float32)
    masked, strides, kind = _masked(query, mask)
    options = launch_options(query.shape[3], query.dtype, int(blocks.diff().amax()), False, tile) | kind
    blocks = on_device(blocks, query.device)
    attention_forward[(len(lists.tiles), clips * heads)](
        query, key, value, masked, out, lse, order, lists.tiles, lists.tile_groups, lists.groups, blocks,
        lists.indices, lists.starts, tokens, len(lists.groups) - 1, heads, *strides, scale, **options,
    )  # fmt: skip
    return out, lse


def launch_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    lists: Lists, order: Tensor, blocks: Tensor, scale: float, tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    clips, heads, tokens, _ = query.shape
    grad, query, key, value = (x.contiguous() for x in (grad, query, key, value))
    delta = (grad.float() * out.float()).sum(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    of_query, of_key, of_value = (torch.zeros_like(x) for x in (query, key, value))
    masked, strides, kind = _masked(query, mask)
    longest, blocks = int(blocks.diff().amax()), on_device(blocks, query.device)
    options = launch_options(query.shape[3], query.dtype, longest, False, tile) | kind
    query_gradients[(len(lists.tiles), clips * heads)](
        grad, query, key, value, masked, lse, delta, of_query, order, lists.tiles, lists.tile_groups, lists.groups,
        blocks, lists.indices, lists.starts, tokens, len(lists.groups) - 1, heads, *strides, scale, **options,
    )  # fmt: skip
    parts = -(-longest // options["KEYS"])
    options = launch_options(query.shape[3], query.dtype, lists.longest, True, tile) | kind
    key_gradients[(len(blocks) - 1, clips * heads, parts)](
        grad, query, key, value, masked, lse, delta, of_key, of_value, order, lists.groups, blocks,
        lists.readers, lists.reader_starts, tokens, len(blocks) - 1, heads, *strides, scale, **options,
    )  # fmt: skip
    return of_query, of_key, of_value


def launch_options(
    size: int, dtype: torch.dtype, longest: int, of_keys: bool, tile: Tile | None = None
) -> dict[str, Any]:
    """The constants of a launch over heads of a size, whose runs, of queries for keys' gradients, have ``longest``."""
    tile, wide = tile or tile_of(size, dtype), max(16, 1 << (size - 1).bit_length())
    return {
        "D": size, "WIDE": wide, "QUERIES": tile.queries, "KEYS": tile.keys,
        "SPLITS": -(-longest // (tile.queries if of_keys else tile.keys)), "MASKED": False, "ADDED": False,
        "CHUNK": wide if dtype.itemsize == 2 else min(wide, CHUNK), "num_warps": tile.warps,
    }  # fmt: skip


def _masked(query: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[int, int, int], dict[str, bool]]:
    """The mask as the kernels read it, its strides by clip, head and row, and what it is."""
    if mask is None:
        return query, (0, 0, 0), {}
    added = mask.dtype != torch.bool
    mask = mask.contiguous() if added else mask.contiguous().to(torch.int8)
    strides = tuple(0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(3))
    return mask, (strides[0], strides[1], strides[2]), {"MASKED": True, "ADDED": added}


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
