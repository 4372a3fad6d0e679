"""``arachnec run``: train with an executable on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from arachnec.backends.torch_distributed.options import RunOptions, run_options


@click.command("run")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), help="Processes to start; default: the cluster's ranks.")
@click.option("--no-equivalence", is_flag=True, help="Do not execute the program on small tensors first.")
@run_options
def command(folder: Path, ranks: int | None, no_equivalence: bool, options: RunOptions) -> None:
    """Train with the executable FOLDER on this machine.

    With another number of ranks than it was compiled for, every step is planned again for that number. To run on
    several machines, start `python -m arachnec.backends.torch_distributed.worker FOLDER` under torchrun; see
    docs/running.md.
    """
    from arachnec.backends.torch_distributed.local_run import run_here
    from arachnec.equivalence.before_run import executed_first

    run_here(folder, ranks, options, None if no_equivalence else executed_first)
