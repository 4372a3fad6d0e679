"""CPU time to make a schedule, against the classes of ``torch.distributed.pipelining``; best of five.

    python -m benchmarks.pipelines.schedule_generation [--ranks 32] [--micro-batches 128]

Ours are made and checked for all ranks. Torch's are the orders of all ranks without what its constructors do besides
(lowering to sends and receives); for GPipe and 1F1B, which torch executes without an order, its printed tables.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import click

from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v


@click.command()
@click.option("--ranks", default=32)
@click.option("--micro-batches", default=128)
def main(ranks: int, micro_batches: int) -> None:
    from tests.pipelining.torch_orders import Stage, schedules

    def theirs(kind: str, v: int) -> Callable[[], object]:
        """The function by which the class makes the orders of all ranks, its constructor's other work left out."""
        schedule_class = schedules.get_schedule_class(kind)
        stages = [Stage(0, v * ranks, ranks, 0) for _ in range(v)]
        if kind in ("GPipe", "1F1B"):
            return schedule_class(stages[0], micro_batches)._get_pipeline_order
        schedule = schedule_class(stages, micro_batches)

        def make() -> object:
            return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}

        return make

    cases: list[tuple[str, Callable[[], PipelineSchedule], Callable[[], object]]] = [
        ("gpipe", lambda: gpipe(ranks, micro_batches), theirs("GPipe", 1)),
        ("1f1b", lambda: one_f_one_b(ranks, micro_batches), theirs("1F1B", 1)),
        ("interleaved-1f1b{v=2}", lambda: interleaved_1f1b(ranks, micro_batches, 2), theirs("Interleaved1F1B", 2)),
        ("zb-h1", lambda: zb_h1(ranks, micro_batches), theirs("InterleavedZeroBubble", 1)),
        ("zb-v", lambda: zb_v(ranks, micro_batches), theirs("ZBVZeroBubble", 2)),
    ]
    click.echo(f"{ranks} ranks, {micro_batches} micro-batches: CPU milliseconds, best of five")
    click.echo(f"{'schedule':24}{'ours':>8}{'torch':>8}{'ratio':>8}")
    for name, ours, torchs in cases:
        mine, other = (min(_milliseconds(make) for _ in range(5)) for make in (ours, torchs))
        click.echo(f"{name:24}{mine:8.1f}{other:8.1f}{mine / other:8.2f}")


def _milliseconds(make: Callable[[], object]) -> float:
    start = time.process_time()
    make()
    return 1000 * (time.process_time() - start)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        main()
