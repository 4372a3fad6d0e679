"""A process as a rank: how it meets the others, its device and its process group.

Before it has joined nobody watches over it, and it would wait as long as a start may take for the store of an agent
that is gone. An agent has its store before it starts ranks, so where nothing listens any more there was one.

torchrun keeps its store when it starts the ranks again. What the ranks of the start before have written, a failure
above all, must not be read by those of the next. Agents do not count restarts alike, so the ranks number their starts
themselves. Every process leaves a name of its own. Rank 0 takes the next number and answers each name with it; a name
of a dead process is answered too, and read by nobody.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from arachnec.cluster.device_agreement import check_devices
from arachnec.cluster.device_selection import DeviceRecord, TorchDevices, select_device, use_device
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cluster
from arachnec.launch.ending import Ended
from arachnec.launch.environment import AGENTS_STORE, CHECKED, compile_once, local_cache, prepare_environment
from arachnec.launch.phases import GROUP_TIMEOUT, START_S
from arachnec.launch.watchdog import STORE_S, Watchdog

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

CHECK_POLL_S = 0.02
NAMES_POLL_S = 0.05  # between two looks of rank 0 at the names of a start
AGENT_POLL_S = 0.5
PROBED = 16  # looks: so often the agent is asked for its store, as it may have been gone before the first one
ORPHANED = 2  # the exit code


def missing(ranks: Sequence[int], world: int, seconds: float) -> UserError:
    """The error of ranks that others have waited for."""
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return user_error(
        f"{named} of {world} did not come within {seconds:.0f} s",
        help="look at the output of their hosts; --start-timeout gives them longer",
    )


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

    def meet(self, *, cpu: bool, planned: Cluster | None = None) -> tuple[torch.device, tuple[str, ...]]:
        """Make the default process group. The device of this rank, and what a person should know of all ranks' devices.

        Raises ``UserError``, the same on every rank, where they do not go together.
        """
        record = select_device(cpu, os.environ, TorchDevices())
        records = self._exchange(record)
        notes = check_devices(records, planned)
        device = use_device(record)
        self._make_process_group(device)
        return device, notes

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

    def _make_process_group(self, device: torch.device) -> None:
        """With a GPU its communicator is made now, not at its first use."""
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
def joined_rank(start_s: float | None = None) -> Iterator[JoinedRank]:
    """This process as a rank of the run that torchrun's environment describes.

    An exception inside ends all ranks of the run, and becomes ``Ended``.
    """
    start_s = START_S if start_s is None else start_s
    prepare_environment(os.environ)
    with ends_with_its_agent():
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]
        from torch.distributed.rendezvous import rendezvous

        store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=start_s))))
        store, number = store_of_this_start(store, rank, world, start_s)
    own = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=STORE_S))
    watchdog = Watchdog(PrefixStore("watchdog", own), rank, world)
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
        device, _ = joined.meet(cpu=cpu)
        joined.watchdog.enter("work")
        work(device)


def store_of_this_start(store: Store, rank: int, world: int, seconds: float) -> tuple[Store, int]:
    """The part of ``store`` that belongs to the ranks of this start alone, and its number, from 1. All of them call it.

    Raises ``UserError`` for ranks that do not come within ``seconds``.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if "TORCHELASTIC_RUN_ID" not in os.environ:  # the store is new
        return store, 1
    name = uuid.uuid4().hex
    store.set(f"name/{rank}", name)
    number = _lead(store, world, seconds) if rank == 0 else _follow(store, rank, world, name, seconds)
    return PrefixStore(f"start/{number}", store), number


def _lead(store: Store, world: int, seconds: float) -> int:
    number = int(store.add("starts", 1))
    answered: set[str] = set()
    coming = list(range(1, world))
    end = time.monotonic() + seconds
    while coming:
        for rank in coming:
            name = store.get(f"name/{rank}").decode() if store.check([f"name/{rank}"]) else ""
            if name and name not in answered:
                answered.add(name)
                store.set(f"number/{name}", str(number))
        coming = [rank for rank in coming if not store.check([f"came/{number}/{rank}"])]
        if coming and time.monotonic() > end:
            raise missing(coming, world, seconds)
        time.sleep(NAMES_POLL_S if coming else 0.0)
    return number


def _follow(store: Store, rank: int, world: int, name: str, seconds: float) -> int:
    try:
        store.wait([f"number/{name}"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise missing([0], world, seconds) from error
    number = int(store.get(f"number/{name}"))
    store.set(f"came/{number}/{rank}", "")
    return number


@contextmanager
def ends_with_its_agent() -> Iterator[None]:
    """Until the block has ended, this process ends with its parent, where that keeps the store to be joined."""
    if os.environ.get(AGENTS_STORE) != "True":
        yield
        return
    joined = threading.Event()
    watch = threading.Thread(target=_end_with, args=(os.getppid(), joined), name="agent-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        joined.set()
        watch.join()


def _end_with(parent: int, joined: threading.Event) -> None:
    looks = itertools.count(1)
    while not joined.wait(AGENT_POLL_S):
        if os.getppid() != parent or (next(looks) % PROBED == 0 and _nothing_listens()):
            rank = os.environ.get("RANK", "?")
            print(f"error: rank {rank} had not joined the others when its launcher ended", file=sys.stderr, flush=True)
            os._exit(ORPHANED)


def _nothing_listens() -> bool:
    """Whether the place of the store refuses connections; one that cannot be reached may come back."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), AGENT_POLL_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):
        return False
