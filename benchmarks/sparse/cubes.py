"""How full cubes are, and what that gives: the sides that a grid gets, beside sides that are powers of two.

    python benchmarks/sparse/cubes.py [--parts filled,locality,cpu] [--json FILE]

``filled``: for usual videos the share of places with a token, in blocks and in groups of 256 and of 64, in tiles of 64.
``locality``: queries and keys that change smoothly over a clip of 21 x 30 x 52 tokens: white noise, smoothed over so
many frames and tokens, half of it common to both. ``needed`` is the share of blocks that hold 90 % of a group's
attention, mean over the groups of 32 drawn tokens; ``places`` the share of all pairs that a GPU computes for these,
empty places among them.
``cpu``: forward, backward, prediction and choice on one thread at density 0.1, median over rounds, both ways in turn.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_speed import HEAD, RANK, dense_step, seconds, sparse_step
from torch import Tensor

from arachnec.kernels.sparse.cube_sides import CELL, Axes, Grid, GridCut, cut_grid, doubled_cut, places_in
from arachnec.kernels.sparse.predictor import block_mass, initial_projections, kept_blocks, needed_blocks, true_scores
from arachnec.kernels.sparse.token_cubes import TokenCubes, arranged

PICTURES = {"480 x 832": (30, 52), "720 x 1280": (45, 80)}
FRAMES = (17, 33, 49, 65, 81, 97, 129)  # of the video; a latent frame has four, and the first one
KEYS, TILE = 64, 64
CLIP = (21, 30, 52)
SMOOTH = ((1, 2), (2, 4), (4, 2))  # frames, and tokens in height and width
SHARPNESS = (3.0, 6.0)  # of scores: how much of the attention goes to few keys
DRAWN = 32
CPU_GRIDS = ((5, 15, 26), (5, 30, 52))


def both(grid: Grid, queries: int) -> dict[str, GridCut]:
    return {
        "powers of two": doubled_cut(grid, queries, KEYS, CELL),
        "this grid's": cut_grid(grid, queries, KEYS, CELL),
    }


def sides(axes: Axes) -> str:
    return " x ".join(str(max(b - a for a, b in itertools.pairwise(starts))) for starts in axes)


def filled() -> list[dict[str, Any]]:
    rows = []
    for picture, (height, width) in PICTURES.items():
        for frames in FRAMES:
            grid = ((frames - 1) // 4 + 1, height, width)
            row: dict[str, Any] = {"video": f"{frames} x {picture}", "grid": " x ".join(map(str, grid))}
            for queries in (256, 64):
                for name, cut in both(grid, queries).items():
                    shares = [math.prod(grid) / places_in(axes, TILE) for axes in (cut.large, cut.small)]
                    row[f"{queries}, {name}"] = [round(share, 2) for share in shares]
                row[f"{queries}, sides"] = ", ".join(map(sides, (cut.large, cut.small, cut.cells)))
            rows.append(row)
            print(row, flush=True)
    return rows


def smooth(noise: Tensor, frames: float, tokens: float) -> Tensor:
    """[C, F, H, W] noise under a Gaussian of these widths, around the ends."""
    spectrum = torch.fft.fftn(noise, dim=(1, 2, 3))
    for axis, width in zip((1, 2, 3), (frames, tokens, tokens), strict=True):
        shape = [1, 1, 1, 1]
        shape[axis] = -1
        spectrum = spectrum * torch.exp(-2 * (math.pi * width * torch.fft.fftfreq(noise.shape[axis])) ** 2).view(shape)
    field = torch.fft.ifftn(spectrum, dim=(1, 2, 3)).real
    return field / field.std()


def locality() -> list[dict[str, Any]]:
    rows = []
    for frames, tokens in SMOOTH:
        rng = torch.Generator().manual_seed(1)
        common, own = (smooth(torch.randn(RANK, *CLIP, generator=rng), frames, tokens) for _ in range(2))
        query, key = (x.flatten(1).T[None, None] for x in (common, 0.5**0.5 * (common + own)))
        for sharpness in SHARPNESS:
            for queries in (256, 64):
                for name, cut in both(CLIP, queries).items():
                    cubes = arranged(CLIP, cut, True, KEYS)
                    needed = needed_share(query, key, cubes, sharpness * RANK**-0.5)
                    tokens_squared = math.prod(CLIP) ** 2
                    places = needed * places_in(cut.large, TILE) * places_in(cut.small, TILE) / tokens_squared
                    rows.append(
                        {
                            "smooth": [frames, tokens], "sharpness": sharpness, "group": queries, "sides": name,
                            "needed": round(needed, 4), "places": round(places, 4),
                        }
                    )  # fmt: skip
                    print(rows[-1], flush=True)
    return rows


def needed_share(query: Tensor, key: Tensor, cubes: TokenCubes, scale: float) -> float:
    rng = torch.Generator().manual_seed(2)
    starts, keys, shares = cubes.groups.tolist(), key[:, :, cubes.order], []
    for token in torch.randint(math.prod(CLIP), (DRAWN,), generator=rng).tolist():
        number = bisect.bisect_right(starts, int(cubes.places[token])) - 1
        rows = query[:, :, cubes.order[starts[number] : starts[number + 1]]]
        shares.append(float(needed_blocks(block_mass(true_scores(rows, keys, scale), cubes.blocks))))
    return statistics.mean(shares)


def cpu(rounds: int) -> list[dict[str, Any]]:
    rows, heads = [], 2
    for grid in CPU_GRIDS:
        torch.manual_seed(0)
        tensors = [torch.randn(1, heads, math.prod(grid), HEAD, requires_grad=True) for _ in range(3)]
        grad = torch.randn(1, heads, math.prod(grid), HEAD)
        by = initial_projections(heads, HEAD, HEAD, RANK, torch.Generator().manual_seed(0))
        calls = {"dense": partial(dense_step, tensors, grad)}
        for name, cut in both(grid, 256).items():
            cubes = arranged(grid, cut, True, KEYS)
            kept = kept_blocks((0.1,) * heads, len(cubes.blocks) - 1)
            calls[name] = partial(sparse_step, tensors, grad, cubes, by, kept)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 1):  # the first warms up
            for name in sorted(calls, reverse=bool(number % 2)):
                took = seconds(calls[name])
                times[name] += [took * 1e3] if number else []
        medians = {name: round(statistics.median(own), 1) for name, own in times.items()}
        rows.append({"grid": grid, "tokens": math.prod(grid), "heads": heads, "ms": medians})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="filled,locality,cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"filled": filled, "locality": locality, "cpu": lambda: cpu(options.rounds)}
    told = {name: parts[name]() for name in options.parts.split(",")} | {"torch": torch.__version__}
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
