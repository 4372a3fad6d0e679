"""``arachnec run``: train, or sample, with an executable on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arachnec.backends.torch_distributed.options import RunOptions, run_options

if TYPE_CHECKING:
    from arachnec.ir.nodes import Module

RESULTS = "results"
OF_NOBODY = vars(RunOptions())
OPTION_OF = {"settings": "set"}
OF_BOTH = ("report", "stall_timeout")  # training and sampling


@click.command("run")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(min=1), help="Processes to start; default: the cluster's ranks.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Of an executable that samples: write latents and videos there; default: FOLDER/results.",
)
@click.option("--no-equivalence", is_flag=True, help="Do not execute the program on small tensors first.")
@run_options
def command(folder: Path, ranks: int | None, output: Path | None, no_equivalence: bool, options: RunOptions) -> None:
    """Train with the executable FOLDER on this machine, or sample the requests that it was compiled for.

    With another number of ranks than it was compiled for, every step is planned again for that number. To run on
    several machines, start `python -m arachnec.backends.torch_distributed.worker FOLDER` under torchrun; see
    docs/running.md.
    """
    from arachnec.executable.folder import samples
    from arachnec.models.weights_there import demand_weights_there

    if options.init is not None:
        demand_weights_there(options.init)
    if samples(folder):
        if no_equivalence:
            raise click.UsageError(f"--no-equivalence is of training; {folder} samples")
        sample(folder, ranks, output or folder / RESULTS, options)
        return
    if output is not None:
        raise click.UsageError(f"--output is of an executable that samples; {folder} trains")
    from arachnec.backends.torch_distributed.local_run import run_here

    run_here(folder, ranks, options, None if no_equivalence else check)


def check(program: Module) -> str:
    """What is seen when the program is executed on small tensors. Its imports wait until the ranks are started."""
    from arachnec.equivalence.compare import executed_first

    return executed_first(program)


def sample(folder: Path, ranks: int | None, output: Path, options: RunOptions) -> None:
    """Write what the executable's requests come to. What is finished there stays."""
    from arachnec.commands.generated import generate_here
    from arachnec.executable.folder import demand_folder
    from arachnec.generation.run import prepare_executable

    of_training = [name for name, value in vars(options).items() if name not in OF_BOTH and value != OF_NOBODY[name]]
    if of_training:
        option = OPTION_OF.get(of_training[0], of_training[0]).replace("_", "-")
        raise click.UsageError(f"--{option} is of training; {folder} samples")
    demand_folder(output)
    generation = prepare_executable(folder, output, ranks)
    generate_here(generation, report_file=options.report, stall_timeout=options.stall_timeout)
