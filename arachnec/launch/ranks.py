"""A process as a rank: its device, its process group, and how it ends when something goes wrong."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec

from arachnec.cluster.device_agreement import check_devices
from arachnec.cluster.device_selection import (
    DeviceQuery,
    DeviceRecord,
    TorchDevices,
    select_device,
    use_device,
)
from arachnec.ir.nodes import Cluster
from arachnec.launch.environment import local_cache, prepare_environment
from arachnec.launch.failure import Failure, failure_of, record_failure
from arachnec.launch.kernel_cache import compile_once
from arachnec.launch.local_ranks import CHECKED
from arachnec.launch.orphans import ends_with_its_agent
from arachnec.launch.starts import missing, store_of_this_start
from arachnec.launch.timeouts import GROUP_TIMEOUT, START_S
from arachnec.launch.watchdog import STORE_S, Limits, Watchdog

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

CHECK_POLL_S = 0.02


class Ended(Exception):
    """The run has failed, here or on another rank; ``tells`` says whether this rank is to tell it."""

    def __init__(self, failure: Failure, tells: bool) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.tells = tells


@dataclass(frozen=True)
class JoinedRank:
    """A process that has found the rendezvous store, and is watched over."""

    rank: int
    world: int
    store: Store
    watchdog: Watchdog
    start_s: float

    @property
    def restarted(self) -> bool:
        """Whether a launcher such as torchrun started some rank again after a failure. All ranks say the same, once
        they have agreed on devices."""
        return self.store.add("restarts", 0) > 0

    def agree_on_devices(
        self, *, cpu: bool, planned: Cluster | None = None, query: DeviceQuery | None = None
    ) -> tuple[torch.device, tuple[str, ...]]:
        """The device of this rank, and what a person should know of all ranks' devices.

        Raises ``UserError``, the same on every rank, where they do not go together.
        """
        query = query or TorchDevices()
        record = select_device(cpu, os.environ, query)
        records = self._exchange(record)
        notes = check_devices(records, planned)
        return use_device(record), notes

    def _exchange(self, own: DeviceRecord) -> list[DeviceRecord]:
        self.store.set(f"device/{self.rank}", msgspec.json.encode(own).decode())
        keys = [f"device/{rank}" for rank in range(self.world)]
        try:
            self.store.wait(keys, timedelta(seconds=self.start_s))
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if not absent:
                raise
            raise missing(absent, self.world, self.start_s) from error
        return [msgspec.json.decode(data, type=DeviceRecord) for data in self.store.multi_get(keys)]

    def wait_for_launcher(self) -> None:
        """Wait until the launcher has found nothing wrong with the program, where it looks while ranks start.

        Before, a rank must leave nothing behind. If the launcher finds something, it ends its ranks."""
        if os.environ.get(CHECKED):
            self.watchdog.enter("the check on small tensors that the launcher makes")
            while not self.store.check([CHECKED]):
                time.sleep(CHECK_POLL_S)

    def make_process_group(self, device: torch.device) -> None:
        """The default process group. With a GPU its communicator is made now, not at its first use."""
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        gpu = device.type != "cpu"
        if gpu:
            compile_once(local_cache() / "locks")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpu else "gloo",
            store=PrefixStore("default", self.store),
            rank=self.rank,
            world_size=self.world,
            timeout=GROUP_TIMEOUT,
            device_id=device if gpu else None,
        )


@contextmanager
def joined_rank(start_s: float = START_S, limits: Limits | None = None) -> Iterator[JoinedRank]:
    """This process as a rank of the run that torchrun's environment describes.

    An exception inside ends all ranks of the run, and becomes ``Ended``.
    """
    prepare_environment(os.environ)
    with ends_with_its_agent():
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=start_s))))
        store, number = store_of_this_start(store, rank, world, start_s)
    own = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=STORE_S))
    watchdog = Watchdog(PrefixStore("watchdog", own), rank, world, limits)
    watchdog.enter("start", start_s, "--start-timeout")
    # The first host may have been lost, and its store with it; then the agents that are left know.
    store.add("restarts", number - 1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    try:
        yield JoinedRank(rank, world, store, watchdog, start_s)
        if dist.is_initialized():
            watchdog.enter("end", start_s, "--start-timeout")
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        raise Ended(*watchdog.failed(error)) from error
    watchdog.close()


def as_rank(work: Callable[[torch.device], None], *, cpu: bool) -> None:
    """Do ``work`` as a rank of the run that torchrun's environment describes; with ``cpu`` without GPUs."""
    with joined_rank() as joined:
        device, _ = joined.agree_on_devices(cpu=cpu)
        joined.make_process_group(device)
        joined.watchdog.enter("work")
        work(device)


def exit_with(main: Callable[[], None]) -> None:
    """Run a rank's main; report what it raises to the launcher and end the process with its exit code."""
    try:
        main()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SystemExit:  # of a rank that has left the others in peace
        raise
    except Ended as end:
        end_process(end.failure, tells=end.tells)
    except BaseException as error:
        end_process(failure_of(error), tells=True)


def end_process(failure: Failure, *, tells: bool) -> NoReturn:
    """End this rank with the failure's exit code, without waiting for anybody."""
    if tells:
        record_failure(failure)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the destructors of process groups wait for ranks that will never answer.
    os._exit(failure.exit_code)
