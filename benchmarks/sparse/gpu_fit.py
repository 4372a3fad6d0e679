"""What a GPU's times of sparse attention come to in a plan: the numbers of ``arachnec.cost.sparse_profile.GPU``.

    python benchmarks/sparse/gpu_fit.py [benchmarks/results/gpu_acceptance_nvidia_h200.json]

In: a file of ``python benchmarks/gpu_acceptance.py`` with the section ``sparse``. Each part is fitted over its rows, by
non-negative least squares on the relative error. Of h heads, S tokens and density d:

    forward, backward    d * dense / speed + launches    of each length apart; of the length where a pair takes longest
    choice               a h S^2 + b h S + c             b from putting tokens in order and features of cells
    learning             a h S^2 + c

Choice and learning do not depend on the density: of a length the median over densities is fitted, which no hiccup of
the host moves. Dense is the fastest of the dense kernels, forward and backward together. A plan takes a dense backward
as two forwards, so FLOPs of choice and of learning are counted at a third of both together. Below the numbers: for
every row the ratio that was measured, the one that these numbers give, and the path that a plan takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from arachnec.cost.sparse_attention import WORTH
from arachnec.cost.sparse_profile import GPU, KernelSpeeds
from arachnec.sparsity.head_shares import SPARSE_EVERY

RESULTS = Path(__file__).parents[1] / "results" / "gpu_acceptance_nvidia_h200.json"
HEAD, RANK, CELL = 128, 16, 8  # features of a head and of a predictor, tokens of a cell
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Fit:
    """Least squares: the coefficients, and (predicted - measured) / measured of every row."""

    values: tuple[float, ...]
    residuals: tuple[float, ...]


def fitted(columns: Sequence[Sequence[float]], took: Sequence[float]) -> Fit:
    table = np.array(columns, dtype=float).T / np.array(took)[:, None]
    scale = table.max(axis=0)
    values = nnls(table / scale, np.ones(len(took)))[0] / scale
    return Fit(tuple(map(float, values)), tuple(map(float, table @ values - 1)))


def sparse_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "both_over_dense" in row]


def dense_ms(rows: Sequence[Row]) -> dict[int, tuple[float, float]]:
    """By tokens: forward and backward of the dense kernel that is fastest in both together."""
    fastest: dict[int, tuple[float, float]] = {}
    for row in rows:
        if "dense" in row and "forward_ms" in row:
            both = row["forward_ms"], row["backward_ms"]
            fastest[row["tokens"]] = min(both, fastest.get(row["tokens"], both), key=sum)
    return fastest


def kernel_fits(rows: Sequence[Row]) -> dict[str, tuple[float, float, tuple[float, ...]]]:
    """Of forward and backward: the speed over dense, ms of launches, residuals; of the slowest length."""
    dense, fits = dense_ms(rows), {}
    for number, part in enumerate(("forward", "backward")):
        of_lengths = []
        for tokens, whole in dense.items():
            own = [row for row in sparse_rows(rows) if row["tokens"] == tokens]
            work = [row["density"] * whole[number] for row in own]
            fit = fitted([work, [1.0] * len(own)], [row[f"{part}_ms"] for row in own])
            of_lengths.append((1 / fit.values[0], fit.values[1], fit.residuals))
        fits[part] = min(of_lengths)
    return fits


def dense_rate(rows: Sequence[Row]) -> float:
    """TFLOP of a dense forward in a ms, where a backward takes two forwards: mean over lengths."""
    heads = {row["tokens"]: row["heads"] for row in sparse_rows(rows)}
    rates = [3 * 4 * heads[tokens] * tokens**2 * HEAD / sum(both) for tokens, both in dense_ms(rows).items()]
    return float(np.mean(rates)) / 1e12


def speeds_of(rows: Sequence[Row]) -> tuple[KernelSpeeds, dict[str, tuple[float, ...]]]:
    """The numbers, and the residuals of each fit."""
    kernels, own, flop = kernel_fits(rows), sparse_rows(rows), dense_rate(rows) * 1e12
    sizes = {row["tokens"]: row["heads"] for row in own}
    pairs = [heads * tokens**2 for tokens, heads in sizes.items()]
    linear, one = [heads * tokens for tokens, heads in sizes.items()], [1.0] * len(sizes)

    def took(*parts: str) -> list[float]:
        """The median by length."""
        return [median(sum(row[part] for part in parts) for row in own if row["tokens"] == tokens) for tokens in sizes]

    moving = fitted([linear], took("order_ms", "features_ms"))
    choosing = fitted([pairs, one], took("critical_keys_ms"))
    learning = fitted([pairs, one], took("learning_ms"))
    square = 2 * RANK / CELL**2 / choosing.values[0]  # FLOPs of choice in a ms
    speeds = KernelSpeeds(
        group=GPU.group,
        forward=kernels["forward"][0],
        backward=kernels["backward"][0],
        choice=square / flop,
        moved=moving.values[0] * square / HEAD - 2 - 4 * RANK / CELL,
        overhead=choosing.values[1] + kernels["forward"][1] + kernels["backward"][1],
        head_overhead=0.0,
        learning=(learning.values[0] * flop, 0.0, learning.values[1]),
    )
    residuals = {"order and features": moving.residuals, "critical keys": choosing.residuals}
    residuals |= {"learning": learning.residuals} | {part: fit[2] for part, fit in kernels.items()}
    return speeds, residuals


def planned_ratio(speeds: KernelSpeeds, row: Row, rate: float, learning: bool = False) -> float:
    """Dense over sparse in a plan, on a device whose dense forward does so many TFLOP in a ms; with what is learned in
    every eighth step, or without."""
    heads, tokens, density = row["heads"], row["tokens"], row["density"]
    dense = 4 * heads * tokens**2 * HEAD / 1e12 / rate
    kernels = density * dense * (1 / speeds.forward + 2 / speeds.backward)
    linear = heads * tokens * HEAD * (2 + 4 * RANK / CELL + speeds.moved)
    choice = (2 * heads * RANK / CELL**2 * tokens**2 + linear) / 1e12 / rate / speeds.choice
    of_pair, of_feature, launches = speeds.learning
    learned = heads * tokens * (tokens * of_pair + HEAD * of_feature) / 1e12 / rate + launches
    share = 1 / SPARSE_EVERY if learning else 0.0
    return 3 * dense / (kernels + choice + speeds.overhead + learned * share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    rows = json.loads(parser.parse_args().results.read_text())["sections"]["sparse"]["rows"]
    speeds, residuals = speeds_of(rows)
    rate = dense_rate(rows)
    print(f"dense: {rate * 1e3:.0f} TFLOP/s\n{speeds}")
    for part, of_part in residuals.items():
        print(f"{part:>20}: largest residual {max(map(abs, of_part)):.3f}")
    for row in sparse_rows(rows):
        by_fit, in_plan = planned_ratio(speeds, row, rate), planned_ratio(GPU, row, rate)
        path = "sparse" if planned_ratio(GPU, row, rate, learning=True) * WORTH > 1 else "dense"
        told = f"measured {row['both_over_dense']:.2f}, fitted {by_fit:.2f}, in a plan {in_plan:.2f}: {path}"
        print(f"{row['tokens']:>8} tokens, {row['heads']:>2} heads, density {row['density']:<4}: {told}")


if __name__ == "__main__":
    main()
