"""What dense attention and attention over chosen keys take here, by length and density, one head at a time or a few."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.cost.sparse_profile import AttentionTime
from arachnec.kernels.sparse.predictor import RANK, initial_projections, kept_blocks
from arachnec.kernels.sparse.token_cubes import Grid, token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists, video_attention

DENSITIES = (0.05, 0.1, 0.3)
LEAST, MOST = 1024, {"cpu": 4096}  # tokens: shorter clips are never sparse, longer ones take too long on a CPU
HEADS = {"cpu": 2}  # at a time; on a GPU all of them
REPEATS = 8
Result = TypeVar("Result")


def sparse_grids(grid: Grid, device: torch.device) -> Iterator[Grid]:
    """Up to three grids like a clip's, of fewer frames: the longest that is measured, half of it and a quarter."""
    frames, rows, columns = grid
    frames = min(frames, MOST.get(device.type, 1 << 62) // (rows * columns))
    for count in dict.fromkeys((frames, frames // 2, frames // 4)):
        if count * rows * columns >= LEAST:
            yield count, rows, columns


def measure_sparse(grid: Grid, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> list[AttentionTime]:
    """Of one clip on this grid, for every density; ms of one head, the least of ``REPEATS`` times."""
    heads = min(heads, HEADS.get(device.type, heads))
    rng = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, math.prod(grid), size, generator=rng).to(device, dtype).requires_grad_() for _ in range(3)
    )
    cubes = token_cubes(grid)
    start = initial_projections(heads, size, size, min(RANK, size), rng)
    by = type(start)(start.query.to(device), start.key.to(device))
    blocks = len(cubes.blocks) - 1 - cubes.captions
    times: dict[str, float] = {}
    for _ in range(REPEATS + 1):  # the first warms up
        dense_attention = partial(F.scaled_dot_product_attention, query, key, value)
        _keep(times, "dense", dense_attention, (query, key, value), device)
    dense = {f"dense_{part}": times[f"dense {part}"] / heads for part in ("forward", "backward")}
    rows = []
    for density in DENSITIES:
        times.clear()
        kept = kept_blocks([density] * heads, blocks)
        for _ in range(REPEATS + 1):
            took, lists = _timed(partial(predicted_lists, query, key, by, cubes, kept), device)
            times["choice"] = min(took, times.get("choice", math.inf))
            attend = partial(video_attention, query, key, value, cubes, lists)
            _keep(times, "sparse", attend, (query, key, value), device)
        sparse = {part: times[f"sparse {part}"] / heads for part in ("forward", "backward")}
        share = kept[0] / blocks
        rows.append(AttentionTime(math.prod(grid), share, **dense, **sparse, choice=times["choice"] / heads))
    return rows


def _keep(
    times: dict[str, float], name: str, attend: Callable[[], Tensor], leaves: tuple[Tensor, ...], device: torch.device
) -> None:
    forward, out = _timed(attend, device)
    backward, _ = _timed(lambda: torch.autograd.grad(out.sum(), leaves), device)
    for part, ms in (("forward", forward), ("backward", backward)):
        times[f"{name} {part}"] = min(ms, times.get(f"{name} {part}", math.inf))


def _timed(work: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3, result
