"""How evenly heads of unequal density lie on the ranks of a clip, over drawn density tables.

    python benchmarks/sparse/heads.py [--tables 200] [--groups 512] [--json FILE]

A head's density is 2-8 % with weight 6, 10-20 % with 2, 25-70 % with 1, which is how measured ones spread. Columns are
the heaviest rank's work over the mean (mean and worst over the tables): heads by number, as Ulysses deals them; whole
heads longest first, as DSV does; the best division of whole heads, proved by branch and bound, to 16 heads; and ours,
with the heads' keys and values that go to one more rank than whole heads need. The last columns are what a wrong
forecast costs: the division is made for densities that are off by 10 % and 20 % (log-normal), and weighed by the right.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from arachnec.sparsity.head_shares import balanced, by_number, copies, imbalance, longest_first

HEADS = (12, 16, 24, 40)
RANKS = (4, 8)
DRIFTS = (0.1, 0.2)
PROVED_TO = 16  # heads; above, branch and bound takes long
NODES = 400_000  # of its tree, then the table counts as not proved


def drawn(rng: random.Random, heads: int) -> list[float]:
    """A density for every head."""
    ranges = rng.choices(((0.02, 0.08), (0.10, 0.20), (0.25, 0.70)), (6, 2, 1), k=heads)
    return [rng.uniform(*bounds) for bounds in ranges]


def best_whole(weights: Sequence[float], ranks: int, start: float) -> tuple[float, bool]:
    """The least load of the heaviest rank of whole heads, or ``start``; False where the tree was not finished."""
    order = sorted(weights, reverse=True)
    tail = [sum(order[index:]) for index in range(len(order) + 1)]
    least = max(order[0], sum(order) / ranks, order[ranks - 1] + order[ranks] if len(order) > ranks else 0.0)
    best, nodes = start, 0

    def visit(index: int, loads: tuple[float, ...]) -> None:
        nonlocal best, nodes
        nodes += 1
        if nodes > NODES or best <= least * (1 + 1e-9):
            return
        if index == len(order):
            best = max(loads)
            return
        smallest = order[-1]  # a rank with less room than this takes nothing more
        room = sum(best - load for load in loads if best - load > smallest)
        if room < tail[index]:
            return
        for load in sorted(set(loads)):
            if load + order[index] >= best * (1 - 1e-9):
                break
            at = loads.index(load)
            visit(index + 1, (*loads[:at], load + order[index], *loads[at + 1 :]))

    visit(0, (0.0,) * ranks)
    return best, nodes <= NODES


FEWER = (32, 64, 128)  # query groups of shorter clips


def row(heads: int, ranks: int, tables: int, groups: int) -> dict[str, Any]:
    rng = random.Random(heads * 100 + ranks)
    names = ("by_number", "longest_first", "ours")
    ratios: dict[str, list[float]] = {name: [] for name in names}
    ratios |= {f"off_by_{round(drift * 100)}": [] for drift in DRIFTS}
    optimum, proved, cuts = [], 0, []
    errors = random.Random(0)
    for _ in range(tables):
        weights = drawn(rng, heads)
        mean = sum(weights) / ranks
        ours = balanced(weights, groups, ranks)
        divisions = (by_number(heads, groups, ranks), longest_first(weights, groups, ranks), ours)
        for name, division in zip(names, divisions, strict=True):
            ratios[name].append(imbalance(division, weights, groups))
        cuts.append(copies(ours))
        for drift in DRIFTS:
            forecast = [min(1.0, weight * math.exp(errors.gauss(0, drift))) for weight in weights]
            stale = balanced(forecast, groups, ranks)
            ratios[f"off_by_{round(drift * 100)}"].append(imbalance(stale, weights, groups))
        if heads <= PROVED_TO:
            best, done = best_whole(weights, ranks, ratios["longest_first"][-1] * mean)
            optimum.append(best / mean)
            proved += done
    return {
        "heads": heads,
        "ranks": ranks,
        **{f"{name}_{word}": round(fold(values), 4) for name, values in ratios.items() for word, fold in FOLDS},
        "optimum_mean": round(fmean(optimum), 4) if optimum else None,
        "optimum_proved": proved if optimum else None,
        "copies_mean": round(fmean(cuts), 2),
        "copies_worst": max(cuts),
    }


def worst(tables: int, groups: int) -> float:
    """The heaviest rank over the mean, of all numbers of heads and ranks."""
    ratios = []
    for heads in HEADS:
        for ranks in RANKS:
            rng = random.Random(heads * 100 + ranks)
            for _ in range(tables):
                weights = drawn(rng, heads)
                ratios.append(imbalance(balanced(weights, groups, ranks), weights, groups))
    return max(ratios)


FOLDS = (("mean", fmean), ("worst", max))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=200)
    parser.add_argument("--groups", type=int, default=512, help="query groups of a clip")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row(heads, ranks, arguments.tables, arguments.groups) for heads in HEADS for ranks in RANKS]
    shown = ("by_number", "longest_first", "ours", "off_by_10", "off_by_20")
    print("heads ranks optimum " + " ".join(f"{name:>15}" for name in shown) + "  copies: mean and worst")
    for entry in rows:
        pairs = " ".join(f"{entry[f'{name}_mean']:8.3f}{entry[f'{name}_worst']:7.3f}" for name in shown)
        best = "       " if entry["optimum_mean"] is None else f"{entry['optimum_mean']:7.3f}"
        print(f"{entry['heads']:>5} {entry['ranks']:>5} {best} {pairs}  {entry['copies_mean']} {entry['copies_worst']}")
    fewer = {groups: round(worst(arguments.tables, groups), 4) for groups in FEWER}
    print("worst with fewer groups:", fewer)
    if arguments.json:
        told = {"tables": arguments.tables, "groups": arguments.groups, "rows": rows, "worst_with_groups": fewer}
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
