"""The choice of key blocks: for each query group the blocks that a low-rank prediction gives the most attention.

Cells of neighbouring tokens are scored, not tokens, and a few groups at a time: of the table of cells by cells only a
strip exists, on a GPU none (arXiv 2502.07590, section 4, scores tokens). The mass of a block for a group is the sum of
the softmax over its cells, summed over the group's cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import next_power_of_2

from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.rowwise.row_launch import on_device_of
from arachnec.kernels.sparse.group_mass import group_mass
from arachnec.kernels.sparse.key_lists import KeyLists
from arachnec.kernels.sparse.token_cubes import TokenCubes

# By the features of a cell, at most: cells of queries and of keys whose scores a program holds, and how far reads are
# ahead. None spills on an H100 (benchmarks/sparse/compiled.py).
TILES = ((64, 64, 128, 1), (128, 64, 64, 2), (256, 16, 32, 1))


def launch_mass(query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor) -> Tensor:
    """As ``predicted_mass`` of features on a GPU; of the groups in ``groups`` alone."""
    heads, cells, _ = query.shape
    count, device = len(groups) - 1, query.device
    mass = torch.empty(heads, count, len(blocks) - 1, device=device)
    options = mass_options(query.shape[2], int(groups.diff().amax()), int(blocks.diff().amax()))
    starts = on_device(groups.int(), device), on_device(blocks.int(), device), on_device(sizes.float(), device)
    group_mass[(-(-count // options["GROUPS"]), heads)](
        query.float().contiguous(), key.float().contiguous(), mass, *starts, cells, count, len(blocks) - 1, **options
    )
    return mass


def mass_options(rank: int, group: int, block: int) -> dict[str, int]:
    """The constants of a launch; ``group`` and ``block`` are the most cells that one has."""
    _, queries, keys, stages = next((tile for tile in TILES if rank <= tile[0]), TILES[-1])
    rows, cells = (min(most, next_power_of_2(number)) for most, number in ((queries, group), (keys, block)))
    return {
        "R": rank, "WIDE": max(16, next_power_of_2(rank)),
        "GROUPS": queries // rows, "ROWS": rows, "PARTS": -(-group // rows),
        "BLOCKS": keys // cells, "CELLS": cells, "SPLITS": -(-block // cells),
        "num_warps": 4, "num_stages": stages,
    }  # fmt: skip


STRIP = 1 << 17  # scores that exist at one time: half a megabyte stays in a core's cache
MASSES = 1 << 25  # masses that are sorted at one time on a GPU: 128 MiB, and their places


def critical_keys(
    query: Tensor, key: Tensor, cubes: TokenCubes, kept: Sequence[int], spans: Sequence[tuple[int, int]] | None = None
) -> KeyLists:
    """The lists of blocks with the largest predicted mass, ties to the lower index, and all blocks of captions.

    query, key: features of the cells of video [B, H, C, r], whose products predict scores before the softmax.
    ``kept``: blocks of video that each head keeps, 0 to all. ``spans``: first and end of the groups of each head that
    get a list, all without it; the lists of others are empty. Raises ValueError for other sizes and, on a CPU, for
    features that are not finite.
    """
    cells, video = len(cubes.cells) - 1, len(cubes.blocks) - 1 - cubes.captions
    if query.shape != key.shape or query.dim() != 4 or query.shape[2] != cells:
        raise ValueError(f"features of {cells} cells are wanted, not {tuple(query.shape)} and {tuple(key.shape)}")
    if len(kept) != query.shape[1] or not all(0 <= count <= video for count in kept):
        raise ValueError(f"each of {query.shape[1]} heads keeps 0 to {video} blocks, not {list(kept)}")
    starts = (cubes.group_cells, cubes.block_cells, cubes.cells.diff())  # these stay on the host
    of_all = (0, len(cubes.groups) - 1)
    bounds = [bound for span in spans or [of_all] * len(kept) for bound in span]
    indices, counts = torch.ops.arachnec.critical_keys(query, key, *starts, list(kept), bounds, cubes.captions)
    return KeyLists(indices, counts)


def predicted_mass(query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor) -> Tensor:
    """[n, G, N] fp32: the attention that the groups give to each block, of the features [n, C, r] of n heads.

    ``groups`` [G + 1] and ``blocks`` [N + 1] are starts in cells, ``sizes`` [C] the tokens of each cell; all three on
    the host. Sums have one fixed order.
    """
    count, cells, device = len(query), len(sizes), query.device
    if query.is_cuda:
        with on_device_of(query):
            return launch_mass(query, key, groups, blocks, sizes)
    weight, tokens = on_device(sizes.float().log(), device), sizes.float()
    starts, of_blocks, mass = groups.tolist(), on_device(blocks.long(), device), []
    first = 0
    while first < len(starts) - 1:
        last = first + 1
        while last < len(starts) - 1 and (starts[last + 1] - starts[first]) * cells * count <= STRIP:
            last += 1
        rows = slice(starts[first], starts[last])
        scores = torch.baddbmm(weight, query[:, rows].float(), key.float().mT).softmax(-1)
        of_groups = on_device(_membership(starts[first : last + 1], tokens[rows]), device) @ scores
        by_cell = of_groups.movedim(2, 0).contiguous()
        mass.append(torch.segment_reduce(by_cell, "sum", offsets=of_blocks, axis=0, unsafe=True).movedim(0, 2))
        first = last
    return torch.cat(mass, 1)


def _membership(starts: Sequence[int], tokens: Tensor) -> Tensor:
    """[groups, cells]: the tokens of a cell in the row of its group. Sums as a product: ``index_add_`` has no fixed
    order on a GPU."""
    lengths = torch.tensor(starts).diff()
    table = torch.zeros(len(lengths), len(tokens))
    table[torch.repeat_interleave(lengths), torch.arange(len(tokens))] = tokens
    return table


@torch.library.custom_op("arachnec::critical_keys", mutates_args=())
def _critical_keys(
    query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor, kept: Sequence[int],
    spans: Sequence[int], captions: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return best_blocks(query, key, groups, blocks, sizes, kept, spans, captions)


def best_blocks(
    query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor, kept: Sequence[int],
    spans: Sequence[int], captions: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Indices and counts of the lists; ``spans`` are two numbers a head.

    No host waits for a device: what is read back are starts, which it has.
    """
    if query.device.type == "cpu" and not (query.isfinite().all() and key.isfinite().all()):
        raise ValueError("the predictor's scores are not finite")
    firsts, ends, table = spans[::2], spans[1::2], (len(groups) - 1) * (len(blocks) - 1)
    at_once = 1 if query.device.type == "cpu" else max(1, MASSES // table)  # a core's cache, or few launches
    indices = [query.new_empty(0, dtype=torch.int32)]
    for clip in range(query.shape[0]):
        for head in range(0, len(kept), at_once):
            heads = slice(head, head + at_once)
            first, end = min(firsts[heads]), max(ends[heads])
            if first == end:
                continue
            mass = predicted_mass(query[clip, heads], key[clip, heads], groups[first : end + 1], blocks, sizes)
            lists = _lists(mass, kept[heads], captions)
            for of_head, keep, begin, stop in zip(lists, kept[heads], firsts[heads], ends[heads], strict=True):
                indices.append(of_head[begin - first : stop - first, : keep + captions].reshape(-1))
    return torch.cat(indices), _counts(query, groups, kept, spans, captions)


def _lists(mass: Tensor, kept: Sequence[int], captions: int) -> Tensor:
    """[n, G, most + captions] int32: in each row the blocks that the head keeps, ascending, and those of captions."""
    video, most = mass.shape[2], max(kept)
    best = mass.sort(dim=-1, descending=True, stable=True).indices[..., :most].int()
    keeps = on_device(torch.tensor(kept, dtype=torch.int32), mass.device)[:, None, None]
    place = torch.arange(most + captions, dtype=torch.int32, device=mass.device)
    best = best.masked_fill(place[:most] >= keeps, video).sort(dim=-1).values  # what is not kept goes to the end
    best = torch.cat([best, best.new_empty(*best.shape[:2], captions)], 2)
    return torch.where(place < keeps, best, video + place - keeps)


@_critical_keys.register_fake
def _(
    query: Tensor, key: Tensor, groups: Tensor, blocks: Tensor, sizes: Tensor, kept: Sequence[int],
    spans: Sequence[int], captions: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = zip(kept, spans[::2], spans[1::2], strict=True)
    listed = query.shape[0] * sum((end - first) * (keep + captions) for keep, first, end in rows)
    counts = query.new_empty(query.shape[0], len(kept), groups.shape[0] - 1, dtype=torch.int32)
    return query.new_empty(listed, dtype=torch.int32), counts


def _counts(query: Tensor, groups: Tensor, kept: Sequence[int], spans: Sequence[int], captions: int) -> Tensor:
    counts = torch.zeros(query.shape[0], len(kept), len(groups) - 1, dtype=torch.int32)
    for head, keep in enumerate(kept):
        counts[:, head, spans[2 * head] : spans[2 * head + 1]] = keep + captions
    return on_device(counts, query.device)
