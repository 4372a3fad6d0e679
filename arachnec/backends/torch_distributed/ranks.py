"""A process as a rank: its device, its process group, and how it ends when something goes wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from arachnec.backends.torch_distributed.failure import record_failure

if TYPE_CHECKING:
    import torch

TIMEOUT = timedelta(minutes=10)


def local_device(*, cpu: bool) -> torch.device:
    """The GPU of this local rank; the CPU where that is wanted or there are not enough GPUs."""
    import torch

    if cpu or torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def as_rank(work: Callable[[torch.device], None], device: torch.device) -> None:
    """Do ``work`` as a rank of the process group that torchrun's environment describes."""
    import torch.distributed as dist

    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # connect ranks that talk, not all n^2 pairs
    if device.type == "cuda":  # with its device NCCL connects at once, and other groups are split from this one
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    work(device)
    dist.barrier()
    dist.destroy_process_group()


def exit_with(main: Callable[[], None]) -> None:
    """Run a rank's main; report what it raises to the launcher and end the process with its exit code."""
    try:
        main()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BaseException as error:
        code = record_failure(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the destructors of process groups wait for ranks that will never answer.
        os._exit(code)
