"""What densities by class of length are worth on mixed lengths, beside one density a head for clips of all lengths.

    python benchmarks/sparse/classes.py [--parts mass,plan] [--json FILE]

``mass``: queries and keys that change smoothly over a clip, as far in tokens however long it is, so that of a longer
clip a head needs a smaller share. Six heads: three reaches, each weak and sharp. Clips of three lengths, six short ones
to three middle and one long. Of 24 drawn groups of 256 queries the fewest blocks of 64 keys that hold 90 % of the
attention are a head's density for that length. Three ways: ``by class``, each length has its own; ``mean``, all have
the mean over the clips, which is what a run of one density a head comes to; ``most``, all have that of the length that
needs most, so that all hold what they do by class. Told are the attention that the best blocks of so many hold, and the
pairs of tokens that are computed, of all pairs of the mix. Predictors are not in it.

``plan``: the same three for `video_mix` clips and Wan2.1-1.3B on 8 GPUs, two clips each, simulated with the speeds that
`sparsify` takes by default. Drawn densities (mean 0.1) are those of the longest class that ``mass`` has; of shorter
ones they are as many times larger as there, in the mean over heads.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from cubes import KEYS, RANK, SHARPNESS, SMOOTH, smooth
from heads import drawn
from torch import Tensor

from arachnec.ir.head_density import LENGTH_CLASSES, length_class
from arachnec.kernels.sparse.predictor import block_mass, kept_blocks, needed_blocks, true_scores
from arachnec.kernels.sparse.token_cubes import TokenCubes, token_cubes

GRIDS = {(5, 15, 26): 6, (21, 15, 26): 3, (21, 30, 52): 1}  # and how many clips
QUERIES, DRAWN = 256, 24
Heads = list[float]
Masses = list[Tensor]  # by head, [drawn groups, blocks]


def masses(grid: tuple[int, int, int], cubes: TokenCubes) -> Masses:
    """The share of a group's attention that each block holds."""
    heads: Masses = []
    for frames, tokens in SMOOTH:
        rng = torch.Generator().manual_seed(1)
        common, own = (smooth(torch.randn(RANK, *grid, generator=rng), frames, tokens) for _ in range(2))
        query, key = (x.flatten(1).T[None, None] for x in (common, 0.5**0.5 * (common + own)))
        starts, keys = cubes.groups.tolist(), key[:, :, cubes.order]
        rng = torch.Generator().manual_seed(2)
        places = torch.randint(math.prod(grid), (DRAWN,), generator=rng).tolist()
        for sharpness in SHARPNESS:
            rows = []
            for place in places:
                number = bisect.bisect_right(starts, place) - 1
                group = query[:, :, cubes.order[starts[number] : starts[number + 1]]]
                rows.append(block_mass(true_scores(group, keys, sharpness * RANK**-0.5), cubes.blocks)[0, 0])
            heads.append(torch.stack(rows))
    return heads


def mass() -> dict[str, Any]:
    of_grid = {}
    for grid in GRIDS:
        cubes = token_cubes(grid, queries=QUERIES, keys=KEYS)
        of_grid[grid] = masses(grid, cubes)
        print(grid, "measured", flush=True)
    own = {grid: [needed_blocks(head[:, None])[:, 0].mean().item() for head in of_grid[grid]] for grid in GRIDS}
    clips, heads = sum(GRIDS.values()), range(len(own[next(iter(GRIDS))]))
    mean = [sum(own[grid][head] * count for grid, count in GRIDS.items()) / clips for head in heads]
    most = [max(own[grid][head] for grid in GRIDS) for head in heads]
    ways = {"by class": own, "mean": dict.fromkeys(GRIDS, mean), "most": dict.fromkeys(GRIDS, most)}
    every = sum(count * math.prod(grid) ** 2 for grid, count in GRIDS.items())
    result: dict[str, Any] = {}
    for way, densities in ways.items():
        rows, computed = [], 0.0
        for grid, count in GRIDS.items():
            held, kept = held_by(of_grid[grid], densities[grid])
            computed += count * math.prod(grid) ** 2 * kept
            row = {"tokens": math.prod(grid), "class": length_class(math.prod(grid)), "clips": count}
            row |= {"density": round(kept, 4), "mass": round(statistics.mean(held), 4), "least": round(min(held), 4)}
            rows.append(row)
        result[way] = {"pairs": round(computed / every, 4), "lengths": rows}
        print(way, result[way], flush=True)
    return result


def held_by(heads: Masses, densities: Heads) -> tuple[Heads, float]:
    """By head the attention that the best blocks of its density hold, and the mean share of blocks that are kept."""
    kept = kept_blocks(densities, heads[0].shape[1])
    held = [
        of_head.sort(-1, descending=True).values[:, :count].sum(-1).mean().item()
        for of_head, count in zip(heads, kept, strict=True)
    ]
    return held, statistics.mean(kept) / heads[0].shape[1]


def plan(measured: dict[str, Any], gpus: int = 8) -> dict[str, Any]:
    from simulated import OURS, iteration_ms, trained_alone

    module = trained_alone("wan2_1_1_3b_vae", gpus)
    (stage,) = module.stages
    rng = random.Random(0)
    layers = [drawn(rng, int(str(stage.attrs["heads"]))) for _ in range(int(str(stage.attrs["attentions"])))]
    scale = 0.1 * sum(map(len, layers)) / sum(map(sum, layers))
    known = {row["class"]: row["density"] for row in measured["by class"]["lengths"]}
    lengths = [length_class(clip.tokens) for clip in module.clips]

    def of_class(length: int) -> list[Heads]:
        """By layer; between two lengths as the logarithms go, outside as the last."""
        times = between(known, length) / known[max(known)]
        return [[min(1.0, density * scale * times) for density in row] for row in layers]

    by_class = {length: of_class(length) for length in sorted(set(lengths))}
    table = [list(zip(*(by_class[length][n] for length in lengths), strict=True)) for n in range(len(layers))]
    one = {
        "mean": [[statistics.mean(of_head) for of_head in row] for row in table],
        "most": [[max(of_head) for of_head in row] for row in table],
    }
    files: dict[str, list[dict[str, Any]]] = {
        way: [{"layer": n, "heads": row} for n, row in enumerate(rows)] for way, rows in one.items()
    }
    files["by class"] = [
        row | {"classes": [{"tokens": length, "heads": own[n]} for length, own in by_class.items()]}
        for n, row in enumerate(files["mean"])
    ]
    result: dict[str, Any] = {"clips": len(lengths), "gpus": gpus, "dense_ms": round(iteration_ms(module, OURS)[0], 1)}
    for way, rows in files.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "sparsity.json"
            file.write_text(json.dumps({"model": stage.attrs["source"], "layers": rows}))
            result[way] = round(iteration_ms(module, f"sparsify{{file={file}}},{OURS}")[0], 1)
        print(way, result[way], flush=True)
    return result


def between(known: dict[int, float], length: int) -> float:
    assert set(known) <= set(LENGTH_CLASSES)
    for low, high in zip(sorted(known), sorted(known)[1:], strict=False):
        if low <= length <= high:
            part = math.log(length / low) / math.log(high / low)
            return float(known[low] ** (1 - part) * known[high] ** part)
    return known[min(known)] if length < min(known) else known[max(known)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="mass,plan")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    told: dict[str, Any] = {"mass": mass(), "torch": torch.__version__}
    if "plan" in options.parts.split(","):
        told["plan"] = plan(told["mass"])
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
