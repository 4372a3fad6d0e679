"""One rank: ``python -m arachnec.backends.torch_distributed.worker DIR``, started by ``arachnec run`` or by torchrun.

torchrun --nproc-per-node=4 -m arachnec.backends.torch_distributed.worker build/ --steps 20
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from arachnec.backends.torch_distributed.options import RunOptions, run_options
from arachnec.ir.long_computations import without_garbage_collector
from arachnec.launch.ending import exit_code, exit_with
from arachnec.launch.ranks import joined_rank
from arachnec.launch.start_times import StartClock


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@run_options
def command(folder: Path, options: RunOptions) -> None:
    """Run this rank's part of the executable FOLDER. Rank and world size come from torchrun's environment."""
    clock = StartClock.of_process()
    with joined_rank(options.start_timeout) as joined:
        with without_garbage_collector():
            from arachnec.backends.torch_distributed.engine import train
            from arachnec.backends.torch_distributed.plans.step_plans import planned_for_cpu
            from arachnec.executable.folder import read_executable

        clock.done("imports")
        executable = read_executable(folder)
        clock.done("reading")
        device, notes = joined.meet(cpu=planned_for_cpu(executable), planned=executable.program.cluster)
        clock.done("group")
        joined.wait_for_launcher()
        clock.done("check")
        signum = train(
            executable,
            options,
            device,
            joined.watchdog.enter,
            notes,
            restarted=joined.restarted,
            clock=clock,
            stops=joined.watchdog.stops_after_step,
        )
    if signum:
        sys.exit(exit_code(signum))


if __name__ == "__main__":
    exit_with(lambda: command.main(standalone_mode=False))
