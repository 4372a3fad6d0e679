"""Where the ranks of tests compute: on the CPU over gloo or, where ``ARACHNEC_TEST_DEVICE=cuda``, on a GPU over NCCL.

One GPU serves for all ranks: NCCL refuses two ranks of one host on one GPU, and takes ranks whose hosts have other
names to be apart. They then talk through sockets, as nodes do; kernels of several processes take turns on the GPU. So
what a collective waits for is what it waits for on a real cluster, and its times are nobody's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from arachnec.launch.environment import prepare_environment

VARIABLE = "ARACHNEC_TEST_DEVICE"
ON_GPU = os.environ.get(VARIABLE) == "cuda"
MOST_RANKS = int(os.environ.get("ARACHNEC_TEST_RANKS", "1024"))  # tests of more are skipped: what one GPU can serve
ROUNDING = 1e-8 if ON_GPU else 1e-12  # between two devices, or one and the same, in float64
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "1",  # so that kernels of many ranks find room beside each other
    "NCCL_CUMEM_ENABLE": "0",
}


def rank_device() -> torch.device:
    """The device that a rank of a test computes on."""
    return torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@contextmanager
def without_gpu() -> Iterator[None]:
    """Inside, torch sees no GPU: a process that has used one, as ``torch.export`` does, leaves its forks without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


def share_one_gpu(rank: int, environment: MutableMapping[str, str]) -> None:
    """Have NCCL take this rank for a host of its own. Before its first communicator is made."""
    environment.update(ONE_GPU, NCCL_HOSTID=f"rank-{rank}")


def make_world(rank: int, ranks: int, store: str) -> None:
    """The default process group of ``ranks`` processes, of which this is number ``rank``."""
    device = rank_device()
    if ON_GPU:
        prepare_environment(os.environ)
        share_one_gpu(rank, os.environ)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPU else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
        device_id=device if ON_GPU else None,
    )
