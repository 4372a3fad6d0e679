"""What the order of micro-batches of unequal lengths is worth: the planner's against 1F1B in arrival order.

    python -m benchmarks.pipelines.mixed_lengths [--seeds 5] [--tries 3000] [--json FILE]

Micro-batches are clips of the bucketed video mix without its limit of tokens per GPU, degree 1, one clip each. A stage
takes 1/p of the clip's time, a third of it forward, B = 2F; halved, both gradients take as long as the forward. Bytes
are proportional to tokens. No rank may hold more than in 1F1B in arrival order. "whole" has whole backwards, "split"
uses weight gradients as filling; "+ Z3" improves windows of 64 actions behind the search. The gap is to the lower bound
of the same kind; the speed-up that no order can exceed stands beside it.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

import click

from arachnec.pipelining.evaluate import StageTimes, evaluate, held
from arachnec.pipelining.order_problem import OrderProblem, like_1f1b
from arachnec.pipelining.order_search import plan_order
from arachnec.pipelining.order_windows import improve_windows
from arachnec.pipelining.schedules import one_f_one_b
from arachnec.solver.problem import Effort
from benchmarks.video_mix import tokens

SIZES = ((4, 16), (4, 32), (8, 16), (8, 32))
Z3_STEPS = 5_000_000  # a window


def instance(stages: int, count: int, seed: int) -> OrderProblem:
    """Times in microseconds, sizes in tokens."""
    rng = random.Random(seed)
    lengths = [tokens(rng) for _ in range(count)]
    seconds = [40 * (4 * 5120 * s**2 + 28 * 5120**2 * s) * 4 / 4e14 for s in lengths]
    row = [round(time * 1e6 / 3 / stages) for time in seconds]
    return like_1f1b(StageTimes([row] * stages, [row] * stages, [row] * stages), [lengths] * stages)


def measured(stages: int, count: int, seed: int, tries: int) -> dict[str, float]:
    problem = instance(stages, count, seed)
    base = evaluate(one_f_one_b(stages, count), problem.times).makespan
    row: dict[str, float] = {"stages": stages, "micro_batches": count, "seed": seed}
    for name, split in (("whole", False), ("split", True)):
        begun = time.process_time()
        planned = plan_order(problem, split=split, tries=tries)
        searched = time.process_time()
        windowed = improve_windows(problem, planned.schedule, Effort(Z3_STEPS))
        for most, limit in zip(held(windowed.schedule, problem.saved), problem.limits, strict=True):
            assert most <= limit
        row |= {
            f"{name}": base / planned.makespan,
            f"{name}_z3": base / windowed.makespan,
            f"{name}_bound": base / planned.bound,
            f"{name}_gap": windowed.makespan / planned.bound - 1,
            f"{name}_windows": windowed.windows,
            f"{name}_proved": windowed.proved,
            f"{name}_search_cpu_s": searched - begun,
            f"{name}_z3_cpu_s": time.process_time() - searched,
        }
    return row


@click.command()
@click.option("--seeds", default=5)
@click.option("--tries", default=3000)
@click.option("--json", "to", type=click.Path(path_type=Path))
def main(seeds: int, tries: int, to: Path | None) -> None:
    rows = []
    for stages, count in SIZES:
        for seed in range(seeds):
            rows.append(measured(stages, count, seed, tries))
            click.echo(json.dumps(rows[-1]))
    columns = ("whole", "whole_z3", "whole_bound", "whole_gap", "split", "split_z3", "split_bound", "split_gap")
    click.echo(f"\nmedian of {seeds} seeds, speed-up over 1F1B in arrival order; proved: windows of all seeds")
    heads = ("whole", "+ Z3", "limit", "gap", "split", "+ Z3", "limit", "gap", "proved")
    click.echo(f"{'stages x micro-batches':24}" + "".join(f"{head:>9}" for head in heads))
    for stages, count in SIZES:
        same = [row for row in rows if (row["stages"], row["micro_batches"]) == (stages, count)]
        cells = "".join(f"{statistics.median(row[column] for row in same):9.2f}" for column in columns)
        proved = sum(row["whole_proved"] + row["split_proved"] for row in same)
        windows = sum(row["whole_windows"] + row["split_windows"] for row in same)
        click.echo(f"{f'{stages} x {count}':24}{cells}{f'{proved:.0f}/{windows:.0f}':>9}")
    if to is not None:
        to.write_text(json.dumps({"tries": tries, "z3_steps": Z3_STEPS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
