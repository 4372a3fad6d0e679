"""Runs the kernels of sparse attention in Triton's interpreter; ``main`` gives {case: {tensor: error}}."""

import math
from dataclasses import dataclass

import torch

from arachnec.kernels.sparse.critical_keys import launch_mass, predicted_mass
from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.sparse_attention import Tile, Tiles, launch_backward, launch_forward, lists_of
from arachnec.kernels.sparse.token_cubes import Grid, token_cubes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
CLIPS, HEADS = 1, 3


@dataclass(frozen=True)
class Case:
    """Heads and values of a size each, on a grid with captions, under a mask of some kind; tokens of a cube."""

    size: int
    values: int
    masked: str
    dtype: str
    grid: Grid
    captions: int
    queries: int
    keys: int


CASES = (
    Case(80, 80, "keys", "fp32", (2, 3, 3), 3, 16, 8),
    Case(16, 16, "bias", "fp16", (2, 3, 3), 3, 16, 8),
    Case(16, 24, "", "fp32", (3, 4, 4), 9, 32, 32),  # several tiles of a group and of a block, some of them empty
)


def errors(case: Case) -> dict[str, float]:
    torch.manual_seed(1)
    size, masked, captions = case.size, case.masked, case.captions
    cubes = token_cubes(case.grid, captions=captions, queries=case.queries, keys=case.keys, cell=4)
    total, groups, blocks = len(cubes.order), len(cubes.groups) - 1, len(cubes.blocks) - 1
    table = torch.rand(CLIPS, HEADS, groups, blocks) < torch.tensor([0.0, 0.5, 1.0])[None, :, None, None]
    lists = KeyLists(table.nonzero()[:, 3].int(), table.sum(-1, dtype=torch.int32))
    sizes = (size, size, case.values, case.values)
    query, key, value, grad = (torch.randn(CLIPS, HEADS, total, n).to(DTYPES[case.dtype]) for n in sizes)
    mask = None
    if masked == "keys":
        mask = torch.rand(CLIPS, 1, 1, total) < 0.6
    if masked == "bias":
        mask = torch.randn(1, HEADS, total, total)
    all_lists = lists_of(lists.indices, lists.counts, cubes.order, cubes.groups, cubes.blocks)
    scale = size**-0.5
    how = (all_lists, scale, Tiles(Tile(16, 16, 1), Tile(16, 16, 1)))
    out, lse = launch_forward(query, key, value, mask, *how)
    grads = launch_backward(grad, query, key, value, out, lse, mask, *how)
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    pairs = torch.repeat_interleave(chosen_blocks(lists, blocks), cubes.groups.diff(), 2)
    pairs = torch.repeat_interleave(pairs, cubes.blocks.diff(), 3)
    pairs = torch.cat([pairs, pairs.new_ones(CLIPS, HEADS, captions, total)], 2)[:, :, cubes.places][..., cubes.places]
    scores = exact[0] @ exact[1].mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    scores = scores.masked_fill(~pairs, -math.inf)
    truth = scores.softmax(-1).nan_to_num(0.0) @ exact[2]
    truth.backward(grad.double())
    compared = {"out": (out, truth)} | {
        n: (g, x.grad) for n, g, x in zip(("dq", "dk", "dv"), grads, exact, strict=True)
    }
    sees = scores.logsumexp(-1) > -math.inf
    compared["lse"] = (lse[sees], scores.logsumexp(-1)[sees])
    assert (lse[~sees] == -math.inf).all()
    return {
        name: float((got.double() - want.detach()).abs().max() / want.detach().abs().max())
        for name, (got, want) in compared.items()
    }


MASSES = {  # grid, tokens of a group, a block and a cell, features of a cell
    "several groups and blocks in a tile": ((3, 7, 9), 32, 16, 4, 16),
    "more cells in a group than in a tile": ((5, 9, 14), 256, 8, 1, 5),
    "more cells in a block than in a tile": ((4, 8, 16), 16, 256, 2, 3),
    "long features": ((2, 5, 6), 16, 8, 2, 160),
}


def mass_errors(grid: Grid, queries: int, keys: int, cell: int, rank: int) -> dict[str, float]:
    """Of the kernel's sums, against those of tables of scores."""
    torch.manual_seed(2)
    cubes = token_cubes(grid, queries=queries, keys=keys, cell=cell)
    starts = (cubes.group_cells[1:], cubes.block_cells, cubes.cells.diff())  # without the first group
    query, key = torch.randn(2, HEADS, len(cubes.cells) - 1, rank) / rank**0.25
    want = predicted_mass(query, key, *starts)
    error = (launch_mass(query, key, *starts) - want).abs().max() / want.abs().max()
    return {"mass": float(error)}


def main() -> dict[str, dict[str, float]]:
    attention = {f"{case.size} {case.masked} {case.dtype}": errors(case) for case in CASES}
    return attention | {f"{name}, fp32": mass_errors(*case) for name, case in MASSES.items()}
