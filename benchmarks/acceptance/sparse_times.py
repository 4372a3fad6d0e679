"""What sparse attention takes by length and density, its parts apart, over the fastest dense attention of torch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from acceptance.machine import Machine, Row
from acceptance.sparse_sampled import sampled
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from arachnec.cost.sparse_profile import GPU
from arachnec.kernels.attention.divided_heads import HeadShare
from arachnec.kernels.sparse.critical_keys import critical_keys
from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.predictor import Projections, cell_features, initial_projections, kept_blocks
from arachnec.kernels.sparse.sparse_attention import (
    Tile,
    Tiles,
    launch_backward,
    launch_forward,
    lists_of,
    sparse_attention,
    tiles_of,
)
from arachnec.kernels.sparse.token_cubes import KEYS, QUERIES, Grid, TokenCubes, order_on, token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import LayerState, SparseCascade

HEAD, SCALE = 128, 128**-0.5
CLIPS = (((21, 30, 52), 12, 5), ((33, 45, 80), 4, 3))  # grid in tokens, heads, repeats
DENSITIES = (0.05, 0.1, 0.2, 0.3)
DENSE = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TILES = (
    Tiles(Tile(64, 64, 4), Tile(32, 64, 4)),
    Tiles(Tile(128, 64, 8), Tile(64, 64, 8)),
    Tiles(Tile(64, 64, 4, 4), Tile(32, 64, 4, 4)),
    Tiles(Tile(128, 64, 8, 4), Tile(64, 64, 8, 4)),
    Tiles(Tile(64, 64, 8), Tile(32, 64, 8)),
)
CUBES = ((64, 64), (128, 64), (256, 128), (128, 128))  # tokens of a group and a block
CHOICES = (*(((QUERIES, KEYS), tile) for tile in TILES), *((cubes, tile) for cubes in CUBES for tile in TILES[:2]))
LEFT_S = 6.0
Times = dict[str, float]


@dataclass(frozen=True)
class Clip:
    """Query, key, value and the gradient of the output of one clip, and where its tokens are."""

    heads: tuple[Tensor, ...]
    cubes: TokenCubes
    grid: Grid
    repeats: int
    projections: Projections

    def kept(self, density: float) -> list[int]:
        return kept_blocks([density] * self.heads[0].shape[1], len(self.cubes.blocks) - 1)

    def lists(self, density: float) -> KeyLists:
        return predicted_lists(*self.heads[:2], self.projections, self.cubes, self.kept(density))

    @property
    def leaves(self) -> list[Tensor]:
        return [x.detach().requires_grad_() for x in self.heads[:3]]


def clip_of(machine: Machine, grid: Grid, heads: int, repeats: int) -> Clip:
    torch.manual_seed(0)
    device, rng = machine.device, torch.Generator().manual_seed(0)
    shape = (1, heads, math.prod(grid), HEAD)
    tensors = tuple(torch.randn(shape, device=device).bfloat16() for _ in range(4))
    by = initial_projections(heads, HEAD, HEAD, 16, rng)
    return Clip(
        tensors,
        token_cubes(grid, queries=GPU.group),
        grid,
        repeats,
        Projections(by.query.to(device), by.key.to(device)),
    )


def speed(machine: Machine) -> Iterator[Row]:
    """For every length: some rows against float64, the dense kernels, and sparse attention at every density."""
    for grid, heads, repeats in (((4, 9, 14), 2, 1),) if machine.dry else CLIPS:
        if machine.left < LEFT_S:
            return
        clip = clip_of(machine, grid, heads, repeats)
        yield sampled(clip.heads, clip.cubes, clip.lists(0.3), SCALE)
        dense: dict[str, Times] = {}
        for name in ("math",) if machine.dry else ("torch's choice", *DENSE):
            row = dense_row(machine, clip, name)
            if "problem" not in row:
                dense[name] = row
            yield row
        for density in DENSITIES:
            if machine.left > LEFT_S:
                yield sparse_row(machine, clip, density, dense)
        machine.empty_cache()


def dense_row(machine: Machine, clip: Clip, name: str) -> Row:
    leaves, row = clip.leaves, {"dense": name, "tokens": math.prod(clip.grid), "heads": clip.heads[0].shape[1]}

    def attend() -> Tensor:
        if name == "torch's choice":
            return F.scaled_dot_product_attention(*leaves, scale=SCALE)
        with sdpa_kernel(DENSE.get(name, SDPBackend.MATH)):
            return F.scaled_dot_product_attention(*leaves, scale=SCALE)

    try:
        times = both(machine, clip, attend, leaves)
    except RuntimeError as problem:  # no kernel of this kind
        return {**row, "problem": str(problem)[:300]}
    return {**row, **times, **rates(times, clip, 1.0)}


def sparse_row(machine: Machine, clip: Clip, density: float, dense: dict[str, Times]) -> Row:
    leaves, cubes = clip.leaves, clip.cubes
    query, key = clip.heads[:2]
    kept, lists = clip.kept(density), clip.lists(density)
    order = order_on(cubes, query.device)
    times: Times = {}
    in_order = query.index_select(2, order), key.index_select(2, order)
    of_query, of_key = clip.projections.query, clip.projections.key
    cells = cell_features(in_order[0], of_query, cubes), cell_features(in_order[1], of_key, cubes)
    measures = measuring(clip, lists, density)
    parts: dict[str, Callable[[], Any]] = {
        "choice": lambda: predicted_lists(query, key, clip.projections, cubes, kept),
        "order": lambda: (query.index_select(2, order), key.index_select(2, order)),
        "features": lambda: (cell_features(in_order[0], of_query, cubes), cell_features(in_order[1], of_key, cubes)),
        "critical_keys": lambda: critical_keys(*cells, cubes, kept),
        "learning": measures,
        "lists": lambda: lists_of(lists.indices, lists.counts, order, cubes.groups, cubes.blocks),
    }
    for name, run in parts.items():
        times[f"{name}_ms"], times[f"{name}_host_ms"] = milliseconds(machine, run, clip.repeats)
    times |= both(machine, clip, lambda: sparse_attention(*leaves, lists, cubes, scale=SCALE), leaves)
    row: Row = {"tokens": math.prod(clip.grid), "heads": query.shape[1], "density": density}
    row |= {
        "pairs": share_of_pairs(lists, cubes),
        "group": GPU.group,
        "block": KEYS,
        "tile": described(tiles_of(HEAD, query.dtype)),
    } | times
    row |= rates(times, clip, row["pairs"])
    fastest = {p: min((d[f"{p}_ms"] for d in dense.values()), default=math.nan) for p in ("forward", "backward")}
    row |= {f"{part}_over_dense": ms / times[f"{part}_ms"] for part, ms in fastest.items()}
    sum_of_all = times["forward_ms"] + times["backward_ms"] + times["choice_ms"]
    of_dense = min((d["forward_ms"] + d["backward_ms"] for d in dense.values()), default=math.nan)
    return {**row, "both_over_dense": of_dense / sum_of_all}


def measuring(clip: Clip, lists: KeyLists, density: float) -> Callable[[], Any]:
    """What a layer's predictor learns and is measured by in every step of a run, once its lists are there."""
    query, key = clip.heads[:2]
    heads, layer = query.shape[1], ("block", 0)
    densities = (density,) * heads
    state = LayerState(Site(0, heads, HEAD, None), clip.projections, (0.0,) * heads, densities, sparse=True)
    block = SparseCascade({layer: state}, clip.grid, ("0/0/0",), weight=1.0, lists={layer: lists}).of_block("block")
    shares = tuple(map(HeadShare, range(heads)))
    return lambda: block._measured(state, layer, clip.projections, query, key, clip.cubes, SCALE, shares)


def sizes(machine: Machine) -> Iterator[Row]:
    """Groups, blocks and tiles of the shorter clip at one density: the kernels alone, without the operator."""
    grid, heads, repeats = ((4, 9, 14), 2, 1) if machine.dry else CLIPS[0]
    clip = clip_of(machine, grid, heads, repeats)
    choices = CHOICES[:1] if machine.dry else CHOICES
    if machine.left < LEFT_S:
        return
    runs = [size_runs(clip, *choice) for choice in choices]
    if not machine.dry:
        with ThreadPoolExecutor(8) as pool:  # compiles them
            for done in [pool.submit(run["backward"]) for run in runs]:
                done.exception()
    for ((queries, keys), tile), run in zip(choices, runs, strict=True):
        row: Row = {"group": queries, "block": keys, "tile": described(tile), "tokens": math.prod(grid)}
        if machine.left < LEFT_S:
            return
        try:
            yield {**row, **({} if machine.dry else size_row(machine, clip, run))}
        except Exception as problem:
            yield {**row, "problem": f"{type(problem).__name__}: {str(problem)[-300:]}"}


def size_runs(clip: Clip, sides: tuple[int, int], tiles: Tiles) -> dict[str, Any]:
    """What is timed, and the share of pairs that it computes."""
    query, key, value, grad = clip.heads
    cubes = token_cubes(clip.grid, queries=sides[0], keys=sides[1])
    kept = kept_blocks([0.1] * query.shape[1], len(cubes.blocks) - 1)
    chosen = predicted_lists(query, key, clip.projections, cubes, kept)
    every = lists_of(chosen.indices, chosen.counts, order_on(cubes, query.device), cubes.groups, cubes.blocks)
    how = (None, every, SCALE, tiles)

    def backward() -> Any:
        return launch_backward(grad, query, key, value, *forward(), *how)

    def forward() -> Any:
        return launch_forward(query, key, value, *how)

    return {"forward": forward, "backward": backward, "pairs": share_of_pairs(chosen, cubes)}


def size_row(machine: Machine, clip: Clip, run: dict[str, Any]) -> Row:
    forward, forward_host = milliseconds(machine, run["forward"], 3)
    whole, _ = milliseconds(machine, run["backward"], 3)
    times = {"forward_ms": forward, "forward_host_ms": forward_host, "backward_ms": whole - forward}
    return {"density": 0.1, "pairs": run["pairs"], **times, **rates(times, clip, run["pairs"])}


def share_of_pairs(lists: KeyLists, cubes: TokenCubes) -> float:
    """Of all pairs of tokens those that are computed."""
    table = chosen_blocks(lists, len(cubes.blocks) - 1).double()
    groups, blocks = (starts.diff().double().to(table.device) for starts in (cubes.groups, cubes.blocks))
    return float((groups @ table @ blocks).mean() / len(cubes.order) ** 2)


def rates(times: Times, clip: Clip, share: float) -> Row:
    """TFLOP/s of the pairs that are computed: two products forward, five backward."""
    work = 2 * clip.heads[0].shape[1] * math.prod(clip.grid) ** 2 * HEAD * share / 1e9
    return {"forward_tflops": 2 * work / times["forward_ms"], "backward_tflops": 5 * work / times["backward_ms"]}


def both(machine: Machine, clip: Clip, attend: Callable[[], Tensor], leaves: list[Tensor]) -> Times:
    """Forward and backward apart."""
    times: Times = {}
    times["forward_ms"], times["forward_host_ms"] = milliseconds(machine, attend, clip.repeats)
    out = attend()
    backward = milliseconds(
        machine, lambda: torch.autograd.grad(out, leaves, clip.heads[3], retain_graph=True), clip.repeats
    )
    times["backward_ms"], times["backward_host_ms"] = backward
    return times


def milliseconds(machine: Machine, run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Medians of some calls, after one: on the device, from an empty queue, and on the host until it has queued all."""
    device_ms, host_ms = [], []
    for _ in range(repeats + 1):
        machine.synchronize()
        if not machine.dry:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
        started = time.perf_counter()
        run()
        host_ms.append((time.perf_counter() - started) * 1e3)
        if not machine.dry:
            last.record()
            last.synchronize()
        device_ms.append(host_ms[-1] if machine.dry else first.elapsed_time(last))
    return statistics.median(device_ms[1:]), statistics.median(host_ms[1:])


def described(tiles: Tiles) -> str:
    """Queries x keys / warps / stages: forward and queries' gradients, then keys'."""
    return ", ".join(f"{t.queries} x {t.keys} / {t.warps} / {t.stages}" for t in (tiles.queries, tiles.keys))
