"""One rank: ``python -m arachnec.backends.torch_distributed.worker DIR``, started by ``arachnec run`` or by torchrun.

torchrun --nproc-per-node=4 -m arachnec.backends.torch_distributed.worker build/ --steps 20
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import click

from arachnec.backends.torch_distributed.failure import record_failure
from arachnec.backends.torch_distributed.options import RunOptions, run_options

TIMEOUT = timedelta(minutes=10)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@run_options
def command(folder: Path, options: RunOptions) -> None:
    """Run this rank's part of the executable FOLDER. Rank and world size come from torchrun's environment."""
    import torch.distributed as dist

    from arachnec.backends.executable import read_executable
    from arachnec.backends.torch_distributed.training_run import choose_device, train

    executable = read_executable(folder)
    device = choose_device(executable)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo", timeout=TIMEOUT)
    train(executable, options, device)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BaseException as error:
        code = record_failure(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the destructors of process groups wait for ranks that will never answer.
        os._exit(code)


if __name__ == "__main__":
    main()
