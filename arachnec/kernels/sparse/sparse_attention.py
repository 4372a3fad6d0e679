"""Attention over chosen key blocks, as an operator: forward, log-sum-exp and backward, and launches of its kernels.

Captions' queries are groups behind the others, whose lists name every block. So lists are extended here, and the lists
of readers of each block are made: by sorting, not by counting with atomics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.rowwise.row_launch import on_device_of
from arachnec.kernels.sparse.block_rows import attention_forward, key_gradients, query_gradients
from arachnec.kernels.sparse.cube_sides import cut
from arachnec.kernels.sparse.gathered_attention import gathered_backward, gathered_forward, groups_of
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.token_cubes import TokenCubes, order_on

CHUNK = 64  # columns of 32-bit heads that scores are summed up from at a time: more spill on an H100


@dataclass(frozen=True)
class Tile:
    """Queries and keys whose scores a program holds at a time, its warps, and how far its reads are ahead."""

    queries: int
    keys: int
    warps: int
    stages: int = 3


@dataclass(frozen=True)
class Tiles:
    """Of the forward and the queries' gradients, and of the keys' and values'."""

    queries: Tile
    keys: Tile


def tiles_of(size: int, dtype: torch.dtype) -> Tiles:
    """The largest tried that do not spill on an H100, 64 rows of a 16-bit product, as its tensor cores take them
    (``benchmarks/sparse/compiled.py``)."""
    if dtype.itemsize > 2:
        return Tiles(Tile(16, 16, 8), Tile(16, 16, 8))
    if size <= 64:
        return Tiles(Tile(64, 64, 4), Tile(64, 64, 4))
    return Tiles(Tile(64, 64, 4), Tile(32, 64, 4)) if size <= 128 else Tiles(Tile(64, 32, 8), Tile(16, 64, 8))


@dataclass(frozen=True)
class Lists:
    """Lists of all queries, captions' among them: ``indices`` of blocks, and where the list of each clip, head and
    group ``starts`` in them, [B * H * G + 1]. ``rows`` are the numbers of the lists that the indices are in. ``order``
    is that of the tokens, ``groups`` and ``blocks`` are where they start in it, on the device, and the longest of each
    on the host."""

    indices: Tensor
    starts: Tensor
    rows: Tensor
    order: Tensor
    groups: Tensor
    blocks: Tensor
    longest_group: int
    longest_block: int

    def query_slots(self, queries: int) -> tuple[Tensor, int]:
        return _slots(self.order, self.groups, self.longest_group, queries)

    def key_slots(self, keys: int) -> tuple[Tensor, int]:
        return _slots(self.order, self.blocks, self.longest_block, keys)

    def readers(self) -> tuple[Tensor, Tensor]:
        """For each block of each clip and head the groups that read it, ascending, and where these start."""
        groups, blocks = len(self.groups) - 1, len(self.blocks) - 1
        heads = (len(self.starts) - 1) // groups
        head, group = self.rows // groups, self.rows % groups
        reading = ((head * blocks + self.indices) * groups + group).sort().values
        every_block = torch.arange(heads * blocks + 1, device=self.rows.device)
        return (reading % groups).int(), torch.searchsorted(reading, every_block * groups).int()


def lists_of(indices: Tensor, counts: Tensor, order: Tensor, groups: Tensor, blocks: Tensor) -> Lists:
    """``groups`` and ``blocks`` are on the host, so that nothing waits for a device. Captions' queries are groups no
    longer than the others: all have as many tiles."""
    device, count, total = counts.device, len(blocks) - 1, len(order)
    clips, heads, listed = counts.shape
    lengths, video = counts.view(-1, listed).long(), int(groups[-1])
    rows = _repeated(torch.arange(counts.numel(), device=device), lengths.view(-1), len(indices))
    longest = int(groups.diff().amax())
    if video < total:
        ends = torch.tensor([end for _, end in cut(video, total, longest)], dtype=groups.dtype)
        more, of_all = len(ends), torch.arange(clips * heads, device=device)[:, None]
        captions = of_all * (listed + more) + torch.arange(listed, listed + more, device=device)
        rows = torch.cat([rows + rows // listed * more, captions.view(-1).repeat_interleave(count)])
        every = torch.arange(count, device=device, dtype=indices.dtype).repeat(clips * heads * more)
        lengths = torch.cat([lengths, lengths.new_full((clips * heads, more), count)], 1)
        groups = torch.cat([groups, ends])
        rows, order_of_rows = rows.sort(stable=True)
        indices = torch.cat([indices, every])[order_of_rows]
    return Lists(
        indices.int(),
        torch.cat([lengths.new_zeros(1), lengths.view(-1).cumsum(0)]).int(),
        rows,
        order,
        on_device(groups.int(), device),
        on_device(blocks.int(), device),
        longest,
        int(blocks.diff().amax()),
    )


def _slots(order: Tensor, starts: Tensor, longest: int, tile: int) -> tuple[Tensor, int]:
    """The token at each place of each tile, -1 for none, and how many tiles there are for each run that starts there;
    runs have as many as the longest needs."""
    tiles = -(-longest // tile)
    place = starts[:-1, None] + torch.arange(tiles * tile, device=starts.device)
    inside = place < starts[1:, None]
    return torch.where(inside, order[place.clamp_max(len(order) - 1)], -1).int(), tiles


def _repeated(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Each value as often as it is counted; their total is given, so that nobody waits to know it."""
    return torch.repeat_interleave(values, counts, output_size=total)


def launch_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, lists: Lists, scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, H, S, Dv] and log-sum-exp [B, H, S]."""
    clips, heads, tokens, _ = query.shape
    size, own = max(query.shape[3], value.shape[3]), value.shape[3]
    query, key, value = (_wide(x, size) for x in (query, key, value))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    masked, strides, kind = _masked(query, mask)
    tile = (tiles or tiles_of(size, query.dtype)).queries
    (queries, parts), (keys, splits) = lists.query_slots(tile.queries), lists.key_slots(tile.keys)
    attention_forward[(len(queries) * parts, clips * heads)](
        query, key, value, masked, out, lse, queries, keys, lists.indices, lists.starts,
        tokens, len(queries), heads, *strides, scale, **launch_options(size, query.dtype, tile, parts, splits) | kind,
    )  # fmt: skip
    return _narrow(out, own), lse


def launch_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    lists: Lists, scale: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    clips, heads, tokens, own = query.shape
    size, of_values = max(own, value.shape[3]), value.shape[3]
    grad, query, key, value, out = (_wide(x, size) for x in (grad, query, key, value, out))
    of_query, of_key, of_value = (torch.empty_like(x) for x in (query, key, value))
    delta = torch.empty_like(lse)
    masked, strides, kind = _masked(query, mask)
    tiles = tiles or tiles_of(size, query.dtype)
    tile = tiles.queries
    (queries, parts), (keys, splits) = lists.query_slots(tile.queries), lists.key_slots(tile.keys)
    query_gradients[(len(queries) * parts, clips * heads)](
        grad, query, key, value, masked, out, lse, delta, of_query, queries, keys, lists.indices, lists.starts,
        tokens, len(queries), heads, *strides, scale, **launch_options(size, query.dtype, tile, parts, splits) | kind,
    )  # fmt: skip
    tile = tiles.keys
    (queries, parts), (keys, splits) = lists.query_slots(tile.queries), lists.key_slots(tile.keys)
    key_gradients[(len(keys) * splits, clips * heads)](
        grad, query, key, value, masked, lse, delta, of_key, of_value, queries, keys, *lists.readers(),
        tokens, len(keys), heads, *strides, scale,
        **launch_options(size, query.dtype, tile, parts, splits) | kind,
    )  # fmt: skip
    return _narrow(of_query, own), _narrow(of_key, own), _narrow(of_value, of_values)


def _wide(x: Tensor, size: int) -> Tensor:
    """Heads of another size, the kernels' one: zeros behind their own change no product."""
    return x.contiguous() if x.shape[3] == size else F.pad(x, (0, size - x.shape[3]))


def _narrow(x: Tensor, size: int) -> Tensor:
    return x if x.shape[3] == size else x[..., :size].contiguous()


def launch_options(size: int, dtype: torch.dtype, tile: Tile, parts: int, splits: int) -> dict[str, Any]:
    """The constants of a launch over heads of a size, whose groups have ``parts`` tiles and blocks ``splits``."""
    wide = max(16, 1 << (size - 1).bit_length())
    return {
        "D": size, "WIDE": wide, "QUERIES": tile.queries, "KEYS": tile.keys, "PARTS": parts, "SPLITS": splits,
        "CHUNK": wide if dtype.itemsize == 2 else min(wide, CHUNK), "MASKED": False, "ADDED": False,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _masked(query: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[int, int, int], dict[str, bool]]:
    """The mask as the kernels read it, its strides by clip, head and row, and what it is."""
    if mask is None:
        return query, (0, 0, 0), {}
    added = mask.dtype != torch.bool
    mask = mask.contiguous() if added else mask.contiguous().to(torch.int8)
    strides = tuple(0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(3))
    return mask, (strides[0], strides[1], strides[2]), {"MASKED": True, "ADDED": added}


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: KeyLists,
    cubes: TokenCubes,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of each query group over the key blocks of its list; captions' queries attend to everything.

    query, key [B, H, S, D], value [B, H, S, Dv] and ``mask`` [B or 1, H or 1, S or 1, S], boolean or added to the
    scores, are in the sequence's own order. Returns [B, H, S, Dv]; a query that sees nothing gives 0. ``scale`` None
    means D ** -0.5. Raises ValueError for other sizes.
    """
    total, groups = len(cubes.order), len(cubes.groups) - 1
    batch = tuple(query.shape[:2])
    sizes = [tuple(x.shape[:3]) for x in (query, key, value)]
    if sizes != [(*batch, total)] * 3 or query.shape[3] != key.shape[3]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"heads of {total} queries and keys are wanted, not {shapes}")
    if tuple(lists.counts.shape) != (*batch, groups):
        raise ValueError(f"lists of {groups} groups of {batch} are wanted, not {tuple(lists.counts.shape)}")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if query.is_cuda and query.dtype == torch.float64:
        raise ValueError("on a GPU heads have 16 or 32 bits a number, not 64")
    starts = (order_on(cubes, query.device), cubes.groups, cubes.blocks)  # where cubes start stays on the host
    out: Tensor = torch.ops.arachnec.sparse_attention(
        query, key, value, mask, lists.indices, lists.counts, *starts, scale
    )[0]
    return out


@torch.library.custom_op("arachnec::sparse_attention", mutates_args=())
def _sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    order: Tensor,
    groups: Tensor,
    blocks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; the latter has no gradient."""
    if query.is_cuda:
        with on_device_of(query):
            return launch_forward(query, key, value, mask, lists_of(indices, counts, order, groups, blocks), scale)
    lists = groups_of(indices, counts, order, groups, blocks)
    return gathered_forward(query, key, value, mask, lists, scale)


@torch.library.custom_op("arachnec::sparse_attention_backward", mutates_args=())
def _sparse_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    indices: Tensor,
    counts: Tensor,
    order: Tensor,
    groups: Tensor,
    blocks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        with on_device_of(query):
            every = lists_of(indices, counts, order, groups, blocks)
            return launch_backward(grad, query, key, value, out, lse, mask, every, scale)
    lists = groups_of(indices, counts, order, groups, blocks)
    return gathered_backward(grad, query, key, value, out, lse, mask, lists, scale)


@_sparse_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=dtype)


@_sparse_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *lists, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, mask, *lists)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.arachnec.sparse_attention_backward(grad, *ctx.saved_tensors, ctx.scale)
    return (*grads, None, None, None, None, None, None, None)


_sparse_attention.register_autograd(_gradients, setup_context=_save)
