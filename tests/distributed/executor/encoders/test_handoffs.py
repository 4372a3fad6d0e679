"""Handoffs over gloo: nobody is held up, nothing is mistaken for another, and a peer that is gone is named."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed import engine
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.executable.folder import read_executable
from arachnec.runtime.device_runtime import DeviceRuntime, HostCopy
from arachnec.runtime.handoffs import HandoffConnections, Handoffs, HandoffThreads, TensorSpec, most_peers_of
from tests.distributed.executor_cases import RUNS, Work, assert_same_gradients, clip, executable, plain_loop
from tests.distributed.harness import run_ranks
from tests.distributed.late_device import LateEvent, late_runtime
from tests.distributed.rank_device import rank_device
from tests.warm_python import warm_python

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 1, 24, 16))
CROSSED = [
    Work((0, 1), (1,), 0.0, "vae"),
    Work((2,), (0,), 0.0, "vae"),
    Work((3,), (0,), 1.0, "vae"),
    Work((2,), (1,), 2.0, "dit", ("c1",)),
    Work((0, 1), (0, 1), 3.0, "dit", ("c0",)),
    Work((3,), (1,), 4.0, "dit", ("c2",)),
]


def handoffs(names: str, *pairs: tuple[int, int]) -> tuple[Handoffs, HandoffThreads]:
    connections, threads = HandoffConnections(), HandoffThreads()
    connections.ensure(pairs)
    return Handoffs(connections, threads, {name: number for number, name in enumerate(names)}), threads


def here(value: torch.Tensor) -> HostCopy:
    return HostCopy(value, DeviceRuntime.of(torch.device("cpu")).record())


def send_before_it_is_there() -> float:
    """The event of the copy is passed only after ``send`` has returned."""
    moved, threads = handoffs("x", (0, 1))
    value, event = torch.zeros(3), LateEvent()
    if dist.get_rank() == 0:
        moved.send("x", HostCopy(value, event), 1)
        value.fill_(7.0)
        event.passed.set()
        moved.finish()
        threads.close()
        return 7.0
    received = moved.prefetch("x", TensorSpec((3,), torch.float32), 0).wait()
    threads.close()
    return float(received.mean())


def test_sending_does_not_wait_for_the_value() -> None:
    assert run_ranks(2, send_before_it_is_there) == [7.0, 7.0]


def send_in_another_order() -> list[float]:
    moved, threads = handoffs("xyz", (0, 1))
    if dist.get_rank() == 0:
        for name in "zxy":
            moved.send(name, here(torch.full((4,), float(ord(name)))), 1)
        moved.finish()
        threads.close()
        return []
    coming = [moved.prefetch(name, TensorSpec((4,), torch.float32), 0) for name in "xyz"]
    received = [float(value.wait()[0]) for value in coming]
    threads.close()
    return received


def test_values_of_equal_shape_are_not_mistaken_for_each_other() -> None:
    """gloo swaps them where only their order tells them apart."""
    assert run_ranks(2, send_in_another_order)[1] == [float(ord(name)) for name in "xyz"]


def send_and_free() -> float:
    """Both send first and receive later; the sender lets go of its value at once."""
    moved, threads = handoffs("xy", (0, 1))
    me = dist.get_rank()
    coming = moved.prefetch("yx"[me], TensorSpec((1000,), torch.float32), 1 - me)
    moved.send("xy"[me], here(torch.full((1000,), float(me))), 1 - me)
    received = float(coming.wait().mean())
    moved.finish()
    threads.close()
    return received


def test_two_ranks_may_send_to_each_other_first() -> None:
    assert run_ranks(2, send_and_free) == [1.0, 0.0]


def connect_anew() -> tuple[int, int, int]:
    connections = HandoffConnections(most_peers=1)
    connections.ensure([(0, 1)])
    first = connections.peers()
    connections.ensure([(1, 0)])  # is there
    connections.ensure([(2, 1)])
    return first, connections.peers(), connections.renewed


def test_connections_are_counted_and_given_up_where_a_rank_would_have_too_many() -> None:
    assert run_ranks(3, connect_anew) == [(1, 0, 1), (1, 1, 1), (0, 1, 1)]


def test_the_rank_with_the_most_peers_counts() -> None:
    assert most_peers_of([(0, 1), (0, 2), (1, 2), (0, 3)]) == 3
    assert most_peers_of([]) == 0


DIES = """
import os, sys, time
import torch.distributed as dist
from datetime import timedelta
from arachnec.runtime.handoffs import HandoffConnections
from arachnec.ir.diagnostic import UserError, render

os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3,
                        timeout=timedelta(seconds=2))
connections = HandoffConnections(connect_s=4.0)
connections._renew()
if rank == 0:
    os._exit(0)
time.sleep(0.3)
try:
    connections.ensure([(0, rank)])
except UserError as error:
    print(render(error.diagnostics[0]), flush=True)
os._exit(0)
"""


def test_a_peer_that_died_before_its_first_message_is_named_on_either_side(tmp_path: Path) -> None:
    """One of the two ranks that stay is the passive side, which gloo would let wait for ever."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [warm_python(RUNS), "-c", DIES]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, env=environment)
        for rank in range(3)
    ]
    said = [rank.communicate(timeout=60)[0].decode() for rank in ranks]
    for rank in (1, 2):
        assert f"rank {rank} could not connect to rank 0 within 4 s" in said[rank]


def train_on_a_late_device(folder: Path, options: RunOptions) -> list[str]:
    late = late_runtime()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRuntime, "of", classmethod(lambda cls, device: late))
        engine.train(read_executable(folder), options, torch.device("cpu"))
    return late.copies


def test_nothing_is_read_before_its_copy_is_done(tmp_path: Path) -> None:
    folder = executable(tmp_path, [CLIPS], CROSSED, 2, encoder=True)
    copies = run_ranks(2, train_on_a_late_device, folder, RunOptions(save_gradients=tmp_path / "g.safetensors"))
    assert_same_gradients(tmp_path / "g.safetensors", plain_loop(folder, CLIPS)[1])
    assert [sorted(set(ways)) for ways in copies] == [["to device", "to host"]] * 2


def prepare_in_threads(folder: Path) -> set[str]:
    """The threads in which ``sample`` ran."""
    from arachnec.models import batch

    threads: set[str] = set()
    make = batch.clip_generator

    def noted(*arguments: object) -> torch.Generator:
        threads.add(threading.current_thread().name.partition("_")[0])
        return make(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "clip_generator", noted)
        engine.train(read_executable(folder), RunOptions(), rank_device())
    return threads


def test_batches_are_made_in_a_thread_of_their_own(tmp_path: Path) -> None:
    folder = executable(tmp_path, [CLIPS], CROSSED, 2, encoder=True)
    assert run_ranks(2, prepare_in_threads, folder) == [{"batches"}] * 2
