"""Heterogeneous models: partition, placement and schedule found together, against interleaved 1F1B evenly cut.

    python -m benchmarks.pipelines.adaptis_table [--tries 250] [--json FILE]

Times are forward FLOPs per token of every layer and of the head (LLaMA-2 7B, Gemma-2 2B, Gemma 7B, DeepSeek 16B MoE,
Nemotron-H 8B, simplified), B = 2F, its halves equal. A layer saves one unit of bytes, and so does the head. The
baseline has two chunks a rank, layers dealt out in order, the head with the last chunk; ours may fill every device to
what the baseline's fullest holds.

"even/bound": the baseline over 3 m max(total / p, largest layer). "found": its makespan over ours; "over bound": ours
over 3 m times the busiest rank of the best assignment of whole layers, any layer anywhere; "limit": the baseline over
that. "balanced" and "+ split" say where the gain comes from: interleaved 1F1B with
balanced cuts; the same cuts with halved backwards and a list schedule.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_left
from collections import Counter
from functools import cache
from operator import mul
from pathlib import Path

import click

from arachnec.pipelining.evaluate import evaluate, held
from arachnec.pipelining.order_search import list_schedule
from arachnec.pipelining.pipeline_model import LayerCosts, PipelineInstance, order_problem
from arachnec.pipelining.pipeline_search import balanced_sizes, even_sizes, find_plan, interleaved
from arachnec.pipelining.schedules import interleaved_1f1b

NEMOTRON = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-"
MODELS: dict[str, tuple[list[int], int]] = {
    "LLaMA-2 7B": ([438] * 32, 262),
    "Gemma-2 2B": ([172] * 26, 1180),
    "Gemma 7B": ([587] * 28, 1573),
    "DeepSeek 16B MoE": ([196, *[199] * 26], 419),
    "Nemotron-H 8B": ([{"M": 225, "-": 352, "*": 117}[kind] for kind in NEMOTRON], 1074),
}
SIZES = ((4, 16), (8, 32), (8, 16))
CHUNKS = 2


def best_assignment(costs: list[int], ranks: int) -> int:
    """The busiest rank's work in the best assignment of whole layers, any layer anywhere; exact, for few kinds."""
    kinds = Counter(costs)
    sizes, counts = tuple(kinds), tuple(kinds.values())
    sums = {0}
    for size, count in kinds.items():
        sums = {total + k * size for total in sums for k in range(count + 1)}
    least = max(max(costs), -(-sum(costs) // ranks))
    candidates = sorted(total for total in sums if total >= least)
    return candidates[bisect_left(candidates, True, key=lambda most: _packs(sizes, counts, most, ranks))]


def _packs(sizes: tuple[int, ...], counts: tuple[int, ...], most: int, ranks: int) -> bool:
    """Whether so many ranks of so much work hold all layers: what can be left, rank by rank, of the fullest loads."""
    left = {counts}
    for _ in range(ranks):
        left = {
            tuple(a - b for a, b in zip(remaining, load, strict=True))
            for remaining in left
            for load in _loads(sizes, remaining, most)
        }
    return (0,) * len(sizes) in left


@cache
def _loads(sizes: tuple[int, ...], counts: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    """All loads of a rank to which no layer can be added."""
    if len(sizes) == 1:
        return ((min(counts[0], most // sizes[0]),),)
    return tuple(
        (k, *rest)
        for k in range(min(counts[0], most // sizes[0]) + 1)
        for rest in _loads(sizes[1:], counts[1:], most - k * sizes[0])
        if k == counts[0] or k * sizes[0] + sum(map(mul, rest, sizes[1:])) + sizes[0] > most
    )


def measured(model: str, ranks: int, count: int, tries: int) -> dict[str, object]:
    layers, head = MODELS[model]
    costs = [*layers, head]
    even = (*even_sizes(len(layers), CHUNKS * ranks)[:-1], even_sizes(len(layers), CHUNKS * ranks)[-1] + 1)
    layer_costs = tuple(LayerCosts(cost, cost, cost, saved=1) for cost in costs)
    unlimited = PipelineInstance(layer_costs, count, (1.0,) * ranks, (float("inf"),) * ranks)
    baseline = interleaved_1f1b(ranks, count, CHUNKS)
    problem = order_problem(unlimited, even, interleaved(ranks, CHUNKS))
    base = evaluate(baseline, problem.times).makespan
    memory = max(held(baseline, problem.saved))
    instance = PipelineInstance(layer_costs, count, (1.0,) * ranks, (memory,) * ranks)

    balanced = balanced_sizes(instance, interleaved(ranks, CHUNKS))
    cut = order_problem(instance, balanced, interleaved(ranks, CHUNKS))
    begun = time.process_time()
    plan = find_plan(instance, tries=tries)
    spent = time.process_time() - begun
    most = max(plan.performance.memory)
    assert most <= memory
    busiest = best_assignment(costs, ranks)
    return {
        "model": model,
        "ranks": ranks,
        "micro_batches": count,
        "base_over_plain_bound": base / (3 * count * max(sum(costs) / ranks, *costs)),
        "balanced": base / evaluate(baseline, cut.times).makespan,
        "split": base / list_schedule(cut, range(count), True)[0],
        "found": base / plan.performance.makespan,
        "over_bound": plan.performance.makespan / (3 * count * busiest),
        "limit": base / (3 * count * busiest),
        "memory": most,
        "memory_of_baseline": memory,
        "sizes": plan.plan.sizes,
        "placement": plan.plan.placement,
        "repaired": plan.repaired,
        "cpu_s": spent,
    }


@click.command()
@click.option("--tries", default=250)
@click.option("--json", "to", type=click.Path(path_type=Path))
def main(tries: int, to: Path | None) -> None:
    rows = []
    heads = ("even/bound", "balanced", "+ split", "found", "over bound", "limit", "memory", "CPU s")
    click.echo(f"{'model':20}{'p':>3}{'m':>4}" + "".join(f"{head:>12}" for head in heads))
    for model in MODELS:
        for ranks, count in SIZES:
            row = measured(model, ranks, count, tries)
            rows.append(row)
            numbers = [
                row[name] for name in ("base_over_plain_bound", "balanced", "split", "found", "over_bound", "limit")
            ]
            cells = "".join(f"{number:12.3f}" for number in numbers)
            memory = f"{row['memory']:.0f} of {row['memory_of_baseline']:.0f}"
            click.echo(f"{model:20}{ranks:3}{count:4}{cells}{memory:>12}{row['cpu_s']:12.1f}")
    gaps = [float(str(row["found"])) for row in rows]
    over = [float(str(row["over_bound"])) for row in rows]
    click.echo(f"found: mean {statistics.mean(gaps):.3f}; over bound: at most {max(over):.3f}; mean of the paper: 1.42")
    if to is not None:
        to.write_text(json.dumps({"tries": tries, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
