"""Launches of the kernel that sums predicted attention by groups of queries and blocks of keys."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.group_mass import group_mass

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
