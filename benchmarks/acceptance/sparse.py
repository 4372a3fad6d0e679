"""Attention over lists of key blocks: against float64, its choice against the processor's, and what both take.

The kernels multiply fp32 in three products of TF32, whose error is that of fp32 to a few units; TF32 alone would be
off by 1e-3. So the limits are those of the section ``attention``: 2e-5 of the norm in fp32 and 1.6e-2 in bf16, where
weights are rounded before they meet values. The log-sum-exp is of fp32 sums in both. Choices may differ from the
processor's only where two blocks' masses are equal to rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from acceptance.machine import Machine, Row
from acceptance.sparse_times import sizes, speed

from arachnec.kernels.sparse.critical_keys import critical_keys
from arachnec.kernels.sparse.sparse_attention import launch_backward, launch_forward, lists_of
from arachnec.kernels.sparse.token_cubes import token_cubes

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.kernels.sparse import dense_truth
from tests.kernels.sparse.dense_truth import Case, Given

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
LSE = 2e-5
CASES = (
    *(Case(size, dtype) for dtype in (torch.bfloat16, torch.float32) for size in (128, 64, 256)),
    Case(128, torch.bfloat16, "keys"),
    Case(64, torch.float32, "bias"),
)
CHOICES = {"remainders": (9, 14, 27), "even": (8, 16, 32)}  # grids; of the second all scores are alike
TURNED = 1e-3  # share of the listed blocks that may be others


def rows(machine: Machine) -> Iterator[Row]:
    cases = CASES[:1] if machine.dry else CASES
    drawn = [dense_truth.given(case, machine.device) for case in cases]
    if not machine.dry:
        compile_all(cases, drawn)
    for case, given in zip(cases, drawn, strict=True):
        yield checked(case, given)
    for name, grid in CHOICES.items():
        yield chosen(machine, name, grid)
    yield from speed(machine)
    yield from sizes(machine)


def compile_all(cases: tuple[Case, ...], drawn: list[Given]) -> None:
    """Compile the kernels of all cases at the same time. One that does not compile says so again in its row."""

    def launched(case: Case, given: Given) -> None:
        query, key, value, grad = given.heads
        cubes, scale, lists = case.cubes, case.size**-0.5, given.lists
        order = cubes.order.to(query.device)
        every = lists_of(lists.indices, lists.counts, order, cubes.groups, cubes.blocks)
        out, lse = launch_forward(query, key, value, given.mask, every, scale)
        launch_backward(grad, query, key, value, out, lse, given.mask, every, scale)

    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(launched, *both) for both in zip(cases, drawn, strict=True)]:
            with suppress(Exception):
                done.result()


def checked(case: Case, given: Given) -> Row:
    row: Row = {"head": case.size, "dtype": str(case.dtype), "mask": case.masked, "tokens": len(case.cubes.order)}
    try:
        error, of_lse, same = dense_truth.errors(case, given)
    except Exception as problem:
        return {**row, "problem": f"{type(problem).__name__}: {str(problem)[-1000:]}", "right": False}
    right = error <= LIMITS[case.dtype] and of_lse <= LSE and same
    return {**row, "error": error, "limit": LIMITS[case.dtype], "lse": of_lse, "same_twice": same, "right": right}


def chosen(machine: Machine, name: str, grid: tuple[int, int, int]) -> Row:
    """Lists of the same features on both devices; where all scores are alike ties go to the lower index on both."""
    cubes, heads = token_cubes(grid, captions=77), 4
    blocks = len(cubes.blocks) - 1 - cubes.captions
    kept = [max(1, blocks * share // 20) for share in (1, 2, 6, 20)]
    rng = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, len(cubes.cells) - 1, 16, generator=rng) / 2 for _ in range(2))
    if name == "even":
        query = torch.zeros_like(query)
    there = critical_keys(query, key, cubes, kept)
    here, again = (critical_keys(query.to(machine.device), key.to(machine.device), cubes, kept) for _ in range(2))
    same = torch.equal(here.indices, again.indices) and torch.equal(here.counts, again.counts)
    alike = torch.equal(here.counts.cpu(), there.counts) and len(here.indices) == len(there.indices)
    differ = float((here.indices.cpu() != there.indices).float().mean()) if alike else 1.0
    limit = 0.0 if name == "even" else TURNED
    row = {"choice": name, "grid": grid, "kept": kept, "differ": differ, "limit": limit, "same_twice": same}
    return {**row, "right": differ <= limit and same}
