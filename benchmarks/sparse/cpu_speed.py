"""Sparse attention on one CPU thread against dense, forward and backward, predictor and choice included.

    python benchmarks/sparse/cpu_speed.py [--rounds 3] [--cases short|long|all|block] [--tokens N] [--json FILE]

fp32, heads of 64, random q, k, v. Each round runs dense (``scaled_dot_product_attention``) and sparse one after the
other, in turn first; times are CPU times of the process, the median over rounds. ``learning`` is what a layer's
predictor learns and is measured by, which a sparse layer does in every eighth step (``learning_steps.SPARSE_EVERY``)
and a dense one in every sixteenth behind the first (``DENSE_EVERY``): ``with learning`` is dense over sparse with that
share in it, ``dense slower`` by how much a dense layer that learns takes longer. ``taken`` is what the planner would
take (``arachnec.cost.sparse_attention.faster_sparse``) with the dense time that was fitted. Below the table: what the
measured times give for ``PathSpeed`` by least squares, with its residuals, and what the choice between the paths costs
at lengths where dense is taken. ``block`` is a whole block as wide as Wan2.1-1.3B's instead: 12 heads of 128,
attention to 512 text tokens, a feed-forward of 8960, at 16,384 tokens and density 0.1, forward and backward with all
gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import nnls
from torch import Tensor, nn

from arachnec.cost.sparse_attention import faster_sparse
from arachnec.cost.sparse_profile import CPU
from arachnec.ir.head_density import LayerDensity, density_rows
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.kernels.attention.divided_heads import HeadShare
from arachnec.kernels.sparse.predictor import RANK, Projections, initial_projections, kept_blocks
from arachnec.kernels.sparse.token_cubes import CELL, Grid, TokenCubes, token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists, video_attention
from arachnec.passes.sparsify import Sparsify
from arachnec.planning.sparse_stages import Choice, ClassAttention, choice_flops, learning_flops
from arachnec.sparsity.head_shares import DENSE_EVERY, SPARSE_EVERY
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import LayerState, SparseCascade

HEAD = 64
UNEVEN = (0.30, 0.22, 0.16, 0.10, 0.07, 0.05, 0.04, 0.02)  # densities: 70 to 98 % sparse, 88 % in the mean


@dataclass(frozen=True)
class Case:
    grid: Grid
    densities: tuple[float, ...]  # one a head
    target: float | None = None  # dense over sparse, at least

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]


SHORT = (
    *(Case(grid, (0.1, 0.1)) for grid in ((2, 8, 16), (4, 8, 16), (4, 16, 16), (8, 16, 16))),
    Case((4, 32, 32), (0.1, 0.1), 4.0),
    Case((8, 32, 32), (0.1,) * 4, 5.0),
    Case((8, 32, 32), UNEVEN, 3.5),
)
LONG = (Case((16, 32, 32), (0.1, 0.1), 6.0), Case((16, 32, 32), (0.2, 0.2), 2.8))


@dataclass(frozen=True)
class PathSpeed:
    """Nanoseconds of forward and backward of one head of 64, by least squares over lengths and densities."""

    dense_pair: float  # a query and a key
    dense_token: float
    sparse_pair: float  # one that is computed
    cell_pair: float  # of the predictor's table
    sparse_token: float  # order, gathered keys, features
    sparse_call: float


def taken(case: Case, dense_pair: float) -> str:
    """What the planner takes on a CPU for one layer of these heads, whose dense pair takes so many nanoseconds."""
    heads, options = len(case.densities), Sparsify()
    speed, overhead = (CPU.forward, CPU.backward, CPU.choice), CPU.head_overhead * heads
    cut = (CPU.group, options.block, CELL, RANK)
    choice = Choice(*cut, options.mass, options.division, CPU.moved, overhead, speed, CPU.learning)

    attention = ClassAttention(heads, HEAD)

    def pairs(per_head: float, unit: str) -> Formula:
        return Formula((Term(per_head * heads, (("B", 1), ("S", 2))),), unit)

    values = {
        "flops": pairs(4e-12 * HEAD, "TFLOP"),
        "forward": pairs(dense_pair * 1e-6 / 3, "ms"),
        "backward": pairs(dense_pair * 2e-6 / 3, "ms"),
        "density": density_rows({0: LayerDensity(1.0, case.densities)}),
        "choice": choice_flops(attention, choice),
        "choice_overhead": Quantity(choice.overhead, "ms"),
        "sparse_speed": speed,
        "learning": learning_flops(attention, choice),
    }
    return "sparse" if faster_sparse(Stage("layer", True, Attributes.of(**values)), case.tokens, 0) else "dense"


def seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def dense_step(heads: Sequence[Tensor], grad: Tensor) -> None:
    torch.autograd.grad(F.scaled_dot_product_attention(*heads), heads, grad)


def sparse_step(heads: Sequence[Tensor], grad: Tensor, cubes: TokenCubes, by: Projections, kept: Sequence[int]) -> None:
    query, key, value = heads
    lists = predicted_lists(query, key, by, cubes, kept)
    torch.autograd.grad(video_attention(query, key, value, cubes, lists), heads, grad)


def learning(
    heads: Sequence[Tensor], grid: Grid, cubes: TokenCubes, by: Projections, densities: Sequence[float]
) -> Callable[[], object]:
    """What a step of learning takes of one layer, once its lists are there."""
    query, key = heads[0].detach(), heads[1].detach()
    layer, count = ("block", 0), len(densities)
    lists = predicted_lists(query, key, by, cubes, kept_blocks(densities, len(cubes.blocks) - 1))
    state = LayerState(Site(0, count, HEAD, None), by, (0.0,) * count, tuple(densities), sparse=True)
    block = SparseCascade({layer: state}, grid, ("0/0/0",), weight=1.0, lists={layer: lists}).of_block("block")
    shares = tuple(map(HeadShare, range(count)))
    return lambda: block._measured(state, layer, by, query, key, cubes, HEAD**-0.5, shares)


def measured(case: Case, rounds: int) -> dict[str, object]:
    torch.manual_seed(0)
    count = len(case.densities)
    heads = [torch.randn(1, count, case.tokens, HEAD, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, count, case.tokens, HEAD)
    cubes = token_cubes(case.grid)
    kept = kept_blocks(case.densities, len(cubes.blocks) - 1)
    by = initial_projections(count, HEAD, HEAD, RANK, torch.Generator().manual_seed(0))
    calls = {
        "dense": lambda: dense_step(heads, grad),
        "sparse": lambda: sparse_step(heads, grad, cubes, by, kept),
        "choice": lambda: predicted_lists(heads[0], heads[1], by, cubes, kept),
        "learning": learning(heads, case.grid, cubes, by, case.densities),
    }
    calls["sparse"]()
    calls["learning"]()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in sorted(calls, reverse=bool(number % 2)):
            times[name].append(seconds(calls[name]))
    dense, sparse, choice, learned = (statistics.median(times[name]) for name in calls)
    return {
        "tokens": case.tokens,
        "heads": count,
        "density": round(sum(case.densities) / count, 3),
        "dense_ms": round(dense * 1e3, 1),
        "sparse_ms": round(sparse * 1e3, 1),
        "choice_ms": round(choice * 1e3, 2),
        "learning_ms": round(learned * 1e3, 1),
        "ratio": round(dense / sparse, 2),
        "ratio_with_learning": round(dense / (sparse + learned / SPARSE_EVERY), 2),
        "dense_slower": round(learned / DENSE_EVERY / dense, 4),
        "target": case.target,
    }


class WideBlock(nn.Module):
    """Without modulation, which costs no time to speak of."""

    def __init__(self, width: int = 1536, heads: int = 12, inner: int = 8960) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query, self.text, self.cross = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.feed = nn.Sequential(nn.Linear(width, inner), nn.GELU("tanh"), nn.Linear(inner, width))

    def forward(self, x: Tensor, text: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        query, key, value = self._split(self.qkv(self.norms[0](x)), 3)
        x = x + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        (query,), (key, value) = self._split(self.query(self.norms[1](x)), 1), self._split(self.text(text), 2)
        x = x + self.cross(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[2](x))

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        return tuple(x.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4))


def wide_block(rounds: int, grid: Grid = (16, 32, 32), density: float = 0.1) -> dict[str, object]:
    torch.manual_seed(0)
    block, cubes = WideBlock(), token_cubes(grid)
    x, text = torch.randn(1, cubes.video, 1536, requires_grad=True), torch.randn(1, 512, 1536)
    kept = kept_blocks([density] * block.heads, len(cubes.blocks) - 1)
    by = initial_projections(block.heads, 128, 128, RANK, torch.Generator().manual_seed(0))

    def chosen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return video_attention(query, key, value, cubes, predicted_lists(query, key, by, cubes, kept))

    def step(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
        return seconds(lambda: block(x, text, attend).sum().backward())

    ways = {"dense": F.scaled_dot_product_attention, "sparse": chosen}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            times[name].append(step(ways[name]))
    dense, sparse = (statistics.median(times[name]) for name in ways)
    row = {"tokens": cubes.video, "width": 1536, "heads": block.heads, "density": density}
    return row | {"dense_s": round(dense, 1), "sparse_s": round(sparse, 1), "ratio": round(dense / sparse, 2)}


def dispatch_overhead(tokens: int) -> float:
    """The dense path through ``video_attention`` over ``scaled_dot_product_attention`` itself, forward and backward."""
    heads = [torch.randn(1, 2, tokens, HEAD, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 2, tokens, HEAD)
    cubes = token_cubes((1, 1, tokens))
    ways = (
        lambda: torch.autograd.grad(video_attention(*heads, cubes, None), heads, grad),
        lambda: dense_step(heads, grad),
    )
    calls = max(2, 2**20 // tokens**2)

    def repeated(way: Callable[[], object]) -> float:
        started = time.process_time()
        for _ in range(calls):
            way()
        return time.process_time() - started

    ratios = []
    for number in range(40):
        times = {way: repeated(way) for way in ways[:: 1 - 2 * (number % 2)]}
        ratios.append(times[ways[0]] / times[ways[1]])
    return round(statistics.median(ratios), 4)


def fitted(rows: Sequence[dict[str, object]]) -> tuple[PathSpeed, dict[str, float]]:
    """Least squares of relative errors, and the largest of those."""
    tokens, heads, density, dense, sparse = (
        np.array([row[name] for row in rows], dtype=float)
        for name in ("tokens", "heads", "density", "dense_ms", "sparse_ms")
    )
    dense, sparse = dense * 1e6 / heads, sparse * 1e6 / heads  # nanoseconds of a head
    dense_terms = np.stack([tokens**2, tokens], 1)
    sparse_terms = np.stack([density * tokens**2, (tokens / CELL) ** 2, tokens, np.ones_like(tokens)], 1)
    of_dense, dense_error = _relative_fit(dense_terms, dense)
    of_sparse, sparse_error = _relative_fit(sparse_terms, sparse)
    speed = PathSpeed(*(round(float(x), 3) for x in (*of_dense, *of_sparse)))
    return speed, {"dense": round(dense_error, 3), "sparse": round(sparse_error, 3)}


def _relative_fit(terms: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, float]:
    """Coefficients of at least 0, and the largest relative error."""
    relative = terms / times[:, None]
    coefficients, _ = nnls(relative, np.ones(len(times)))
    return coefficients, float(np.abs(relative @ coefficients - 1).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", choices=("short", "long", "all", "block"), default="all")
    parser.add_argument("--tokens", type=int, help="of these cases, those of so many tokens")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cases == "block":
        block = wide_block(options.rounds)
        print(block)
        if options.json:
            options.json.write_text(json.dumps(block | {"torch": torch.__version__}, indent=1) + "\n")
        return
    cases = {"short": SHORT, "long": LONG, "all": (*SHORT, *LONG)}[options.cases]
    cases = tuple(case for case in cases if options.tokens in (None, case.tokens))
    print(
        f"{'tokens':>7} {'heads':>5} {'density':>7} {'dense ms':>9} {'sparse ms':>9} {'choice ms':>9}"
        f" {'learning ms':>11} {'ratio':>6} {'with learning':>13} {'dense slower':>12} target"
    )
    rows = []
    for case in cases:
        row = measured(case, options.rounds)
        rows.append(row)
        print(
            f"{row['tokens']:>7} {row['heads']:>5} {row['density']:>7} {row['dense_ms']:>9} {row['sparse_ms']:>9}"
            f" {row['choice_ms']:>9} {row['learning_ms']:>11} {row['ratio']:>6} {row['ratio_with_learning']:>13}"
            f" {row['dense_slower']:>12} {row['target'] or '':>6}",
            flush=True,
        )
    overhead = {tokens: dispatch_overhead(tokens) for tokens in (64, 256, 1024)}
    speed, residuals = fitted(rows)
    for case, row in zip(cases, rows, strict=True):
        row["taken"] = taken(case, speed.dense_pair)
    print("taken:", {f"{row['tokens']} at {row['density']}": row["taken"] for row in rows})
    print(f"dense path through the dispatcher over dense itself: {overhead}")
    print(f"fitted: {speed}, largest relative residuals {residuals}")
    if options.json:
        result = {
            "rows": rows,
            "dispatch_over_dense": overhead,
            "fitted": asdict(speed),
            "residuals": residuals,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
