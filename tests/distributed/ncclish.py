"""A process group with NCCL's semantics over gloo, for ranks that are processes on a CPU.

What differs from gloo, and is checked here:

* *Order.* A communicator runs its operations one after another, as they were issued. Two ranks that send to each other
  outside a batch use one communicator of two.
* *Matching.* The members of a collective must name the same operation, dtype and sizes. gloo swaps data or aborts;
  here every rank gets one message that says what each rank called.
* *Connecting.* Without ``eager`` the first operation of a communicator blocks the host until all members have called.
* *Kernels.* An operation holds one of ``kernels`` places from its issue to its end, in the order of issue over all
  communicators. An operation that waits for its peers keeps its place, as a spinning kernel does.
* *Memory.* Who drops the work of an operation before its end and frees the tensor has other data overwritten on a GPU,
  and who writes to an input before waiting sends something else: both are counted by name (``Counts``).
* *Standstill.* When no operation of any rank moves for ``patience`` seconds, every rank raises ``Standstill`` with the
  circle of who waits for whom.

``install`` registers the backend ``ncclish``, which ``dist.new_group(backend="ncclish")`` then makes groups of.
The tests of what is promised here stand in ``test_ncclish.py``.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

NAME = "ncclish"


class Standstill(RuntimeError):
    """No rank can go on; the message is the circle."""


class Mismatch(RuntimeError):
    """The members of one operation called different ones."""


@dataclass(frozen=True)
class Settings:
    """How the group behaves; the same on every rank. Times in seconds."""

    eager: bool = True  # communicators connect when they are made, as with `device_id`
    kernels: int = 32  # operations that may be pending on one rank
    patience: float = 2.0
    delay: float = 0.0  # that every operation takes on the device, so that the host runs ahead of it


@dataclass
class Counts:
    """What one rank did, since ``install``."""

    communicators: int = 0
    pairs: int = 0  # communicators of two that a send or receive outside a batch made
    operations: int = 0
    host_waits: int = 0  # waits for a work that had not ended: on a GPU a stream waits, and the host goes on
    connected_in_use: int = 0  # communicators that connected at their first operation
    freed_in_flight: list[str] = field(default_factory=list)
    written_in_flight: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Device:
    """What the communicators of one process share."""

    settings: Settings
    counts: Counts
    kernels: _Places
    watch: _Watch


class _Places:
    """Places for kernels, given out in the order they were asked for."""

    def __init__(self, count: int) -> None:
        self._free, self._turn, self._next = count, 0, itertools.count()
        self._changed = threading.Condition()

    def ticket(self) -> int:
        return next(self._next)

    def take(self, ticket: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == ticket and self._free > 0)
            self._turn, self._free = self._turn + 1, self._free - 1
            self._changed.notify_all()

    def give_back(self) -> None:
        with self._changed:
            self._free += 1
            self._changed.notify_all()


class _Watch:
    """Tells all ranks where this one stands, and finds out that none moves any more."""

    def __init__(self, store: dist.Store, rank: int, world: int, patience: float) -> None:
        self._store, self._rank, self._world, self._patience = store, rank, world, patience
        self._lock = threading.Lock()
        self._heads: dict[object, tuple[str, Callable[[], list[int]]]] = {}
        self._moved = time.monotonic()
        self._changes = 0
        self.error: str | None = None
        self.ended = False
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def at(self, what: str, waits_for: Callable[[], list[int]]) -> Iterator[None]:
        """Inside, this rank's ``what`` waits for these ranks to do the same."""
        own = object()  # two communicators of the same ranks may do the same at once
        with self._lock:
            self._heads[own] = what, waits_for
            self._step()
        try:
            yield
        finally:
            with self._lock:
                del self._heads[own]
                self._step()

    def moved(self) -> None:
        with self._lock:
            self._step()

    def _step(self) -> None:
        self._moved = time.monotonic()
        self._changes += 1

    def check(self) -> None:
        if self.error is not None:
            raise Standstill(self.error)

    def _run(self) -> None:
        while not self.ended and self.error is None:
            time.sleep(self._patience / 8)
            with self._lock:
                heads = [(what, waits_for()) for what, waits_for in self._heads.values()]
                still = bool(heads) and time.monotonic() - self._moved > self._patience
                state = {"still": still, "changes": self._changes, "heads": heads}
            try:
                self._store.set(f"state/{self._rank}", json.dumps(state))
                if still:
                    self._judge()
            except RuntimeError:  # the store is gone: the run is over
                return

    def _judge(self) -> None:
        """All that this rank waits for, and all that those wait for, stands still: nobody will ever move."""
        states: dict[int, dict[str, Any]] = {}
        pending = [self._rank]
        while pending:
            rank = pending.pop()
            if rank in states:
                continue
            if not self._store.check([f"state/{rank}"]):
                return
            states[rank] = json.loads(self._store.get(f"state/{rank}"))
            if not states[rank]["still"]:
                return
            pending += [other for _, ranks in states[rank]["heads"] for other in ranks]
        lines = [
            f"rank {rank} in {what} waits for {', '.join(f'rank {other}' for other in ranks) or 'its own device'}"
            for rank, state in sorted(states.items())
            for what, ranks in state["heads"]
        ]
        self.error = "nothing moves any more:\n" + "\n".join(lines)


_device: _Device | None = None


def install(store: dist.Store, rank: int, world: int, settings: Settings) -> Counts:
    """Register the backend for this process. Collective only in so far as the watch of each rank reads the others'.

    ``store`` is one that all ranks share and that outlives the groups.
    """
    global _device
    counts = Counts()
    watch = _Watch(dist.PrefixStore("ncclish", store), rank, world, settings.patience)
    _device = _Device(settings, counts, _Places(settings.kernels), watch)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        dist.batch_isend_irecv = _batched(dist.batch_isend_irecv)
    return counts


def uninstall() -> None:
    """End the watch of this process. The backend's name stays registered; ``install`` makes it anew."""
    global _device
    if _device is not None:
        _device.watch.ended = True
    _device = None


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    assert _device is not None, "call install first"
    return NcclishGroup(
        options.store, options.group_rank, options.group_size, options.timeout, list(options.global_ranks_in_group)
    )


def _batched(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Sends and receives of a batch are one operation of the group's own communicator."""

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, NcclishGroup):
            works: list[dist.Work] = plain(operations)
            return works
        return [group.batch(operations)]

    return batch_isend_irecv


@dataclass
class _State:
    """How far an operation is: what its stream knows of it."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class _Work(dist._Work):
    """An operation on its way. It keeps its tensors until it is waited for, as torch's NCCL works do."""

    def __init__(self, name: str, state: _State, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        super().__init__()
        written = {tensor.untyped_storage().data_ptr() for tensor in outputs}  # in place, which NCCL allows
        self._name, self._state, self._held = name, state, [*inputs, *outputs]
        self._read = [
            (tensor, tensor._version) for tensor in inputs if tensor.untyped_storage().data_ptr() not in written
        ]

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        assert _device is not None
        if not self._state.done.is_set():
            _device.counts.host_waits += 1
        while not self._state.done.wait(0.05):
            _device.watch.check()
        if self._state.error is not None:
            raise self._state.error
        if any(tensor._version != version for tensor, version in self._read):
            _device.counts.written_in_flight.append(self._name)
        self._held, self._read = [], []
        return True

    def is_completed(self) -> bool:
        return self._state.done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._state.error is None


class _Communicator:
    """Operations of some ranks, one after another, on a thread of its own: its stream."""

    def __init__(self, name: str, store: dist.Store, index: int, ranks: list[int], timeout: timedelta) -> None:
        assert _device is not None
        self.name, self.ranks, self._index, self._device = name, ranks, index, _device
        self._store = dist.PrefixStore(f"{name}/", store)
        self._timeout = timeout
        self._inner: dist.ProcessGroupGloo | None = None
        self._issued = 0
        self._queue: list[_Operation] = []
        self._more = threading.Condition()
        self._ended = False
        _device.counts.communicators += 1
        if _device.settings.eager:
            self._connect("made")
        threading.Thread(target=self._stream, daemon=True).start()

    def _missing(self, key: str) -> list[int]:
        return [rank for i, rank in enumerate(self.ranks) if not self._store.check([f"{key}/{i}"])]

    def _meet(self, key: str, what: str, said: str) -> list[str]:
        """Say something under a key and wait until every member has; what each said."""
        self._store.set(f"{key}/{self._index}", said)
        with self._device.watch.at(what, lambda: self._missing(key)):
            while self._missing(key):
                self._device.watch.check()
                time.sleep(0.001)
        return [self._store.get(f"{key}/{i}").decode() for i in range(len(self.ranks))]

    def _connect(self, when: str) -> None:
        """Block the host until every member is here."""
        self._meet(f"connect-{when}", f"connecting {self.name}", "here")
        self._inner = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self._store), self._index, len(self.ranks), self._timeout
        )

    def issue(
        self,
        says: str,
        inputs: list[Tensor],
        outputs: list[Tensor],
        run: Callable[[Any, list[Tensor], list[Tensor]], list[Any]],
        meets: bool = True,
    ) -> _Work:
        """Put an operation at the end of the stream.

        ``run(inner, inputs, outputs)`` starts it on gloo, with copies of the tensors, and returns the works. Nothing
        here but the work that is returned keeps the tensors themselves.
        """
        device = self._device
        device.watch.check()
        if self._inner is None:
            device.counts.connected_in_use += 1
            self._connect("used")
        device.counts.operations += 1
        number, self._issued = self._issued, self._issued + 1
        copies = {id(tensor): tensor.detach().clone() for tensor in [*inputs, *outputs]}
        operation = _Operation(
            self,
            f"{says} #{number} on {self.name}",
            f"op/{number}" if meets else None,
            says,
            device.kernels.ticket(),
            run,
            [copies[id(tensor)] for tensor in inputs],
            [(_Left(tensor), copies[id(tensor)]) for tensor in outputs],
        )
        with self._more:
            self._queue.append(operation)
            self._more.notify()
        return _Work(operation.name, operation.state, inputs, outputs)

    def execute(self, operation: _Operation) -> None:
        device = self._device
        with device.watch.at(operation.name + ", for a place on the device", list):
            device.kernels.take(operation.ticket)
        try:
            if operation.meets is not None:
                said = self._meet(operation.meets, operation.name, operation.says)
                if len(set(said)) > 1:
                    raise Mismatch(f"{self.name}: " + "; ".join(_by_rank(self.ranks, said)))
            time.sleep(device.settings.delay)
            others = [rank for rank in self.ranks if rank != self.ranks[self._index]]
            with device.watch.at(operation.name, lambda: others):
                for started in operation.run(self._inner, operation.inputs, [copy for _, copy in operation.outputs]):
                    started.wait()
        finally:
            device.kernels.give_back()
        for left, value in operation.outputs:
            if not left.write(value):
                device.counts.freed_in_flight.append(operation.name)

    def _stream(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    return
                operation = self._queue.pop(0)
            try:
                self.execute(operation)
            except BaseException as error:
                operation.state.error = error
            self._device.watch.moved()
            operation.state.done.set()

    def close(self) -> None:
        with self._more:
            self._ended = True
            self._more.notify()


@dataclass(frozen=True)
class _Operation:
    """What a communicator does next: copies of what goes in, and where what comes out belongs."""

    communicator: _Communicator
    name: str
    meets: str | None  # the key under which its members compare what they called
    says: str
    ticket: int
    run: Callable[[Any, list[Tensor], list[Tensor]], list[Any]]
    inputs: list[Tensor]
    outputs: list[tuple[_Left, Tensor]]
    state: _State = field(default_factory=_State)


class _Left:
    """A tensor that nobody has to keep: written to where it still exists."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    @torch.no_grad()
    def write(self, value: Tensor) -> bool:
        if self._storage.expired():
            return False
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return False
        dtype, shape, stride, offset = self._layout
        torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).copy_(value)
        return True


def _by_rank(ranks: list[int], said: list[str]) -> Iterator[str]:
    for rank, words in zip(ranks, said, strict=True):
        yield f"rank {rank} called {words}"


def _sizes(*tensors: Tensor) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


class NcclishGroup(dist.ProcessGroup):
    """The communicator of the group, and one for each pair that sends outside a batch."""

    def __init__(self, store: dist.Store, index: int, size: int, timeout: timedelta, ranks: list[int]) -> None:
        super().__init__(index, size)
        self._name = "-".join(map(str, ranks)) if ranks else f"all {size}"
        self._ranks = ranks or list(range(size))
        self._base, self._me, self._timeout = store, index, timeout
        self._whole = _Communicator(f"group {self._name}", store, index, self._ranks, timeout)
        self._pairs: dict[tuple[int, int], _Communicator] = {}

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._torch_name = name  # torch's own would tell it to a backend, and there is none below

    @property
    def group_name(self) -> str:
        return self._torch_name

    def _pair(self, peer: int) -> _Communicator:
        """torch makes a communicator of two at the first send or receive of a pair, whatever ``device_id`` says."""
        assert _device is not None
        low, high = sorted((self._me, peer))
        if (low, high) not in self._pairs:
            ranks = [self._ranks[low], self._ranks[high]]
            name = f"pair {ranks[0]}-{ranks[1]} of {self._name}"
            _device.counts.pairs += 1
            self._pairs[low, high] = _Communicator(name, self._base, int(self._me == high), ranks, self._timeout)
        return self._pairs[low, high]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        other = int(peer > self._me)
        said = f"send or receive {_sizes(*tensors)}"
        return self._pair(peer).issue(said, tensors, [], lambda inner, given, _: [inner.send(given, other, tag)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Work:
        other = int(peer > self._me)
        said = f"send or receive {_sizes(*tensors)}"
        return self._pair(peer).issue(said, [], tensors, lambda inner, _, into: [inner.recv(into, other, tag)])

    def batch(self, operations: list[dist.P2POp]) -> _Work:
        """One operation; only those that it names take part, and matching is gloo's own by pair."""
        sends = [op for op in operations if op.op is dist.isend]
        receives = [op for op in operations if op.op is not dist.isend]
        given_to, taken_from = [op.group_peer for op in sends], [op.group_peer for op in receives]

        def run(inner: Any, given: list[Tensor], into: list[Tensor]) -> list[Any]:
            return [
                *(inner.recv([tensor], peer, 0) for tensor, peer in zip(into, taken_from, strict=True)),
                *(inner.send([tensor], peer, 0) for tensor, peer in zip(given, given_to, strict=True)),
            ]

        given, into = [op.tensor for op in sends], [op.tensor for op in receives]
        return self._whole.issue(f"batch of {len(operations)}", given, into, run, meets=False)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Work:
        options = options or dist.AllreduceOptions()
        said = f"all_reduce {_sizes(*tensors)}"
        return self._whole.issue(said, tensors, tensors, lambda inner, _, values: [inner.allreduce(values, options)])

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Work:
        said = f"broadcast from {options.rootRank} {_sizes(*tensors)}"
        return self._whole.issue(said, tensors, tensors, lambda inner, _, values: [inner.broadcast(values, options)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> _Work:
        options = options or dist.AllgatherOptions()
        (row,) = outputs
        if len({tensor.numel() for tensor in row}) > 1:
            return self._allgather_uneven(row, inputs[0])
        said = f"all_gather {_sizes(*inputs)}"
        return self._whole.issue(
            said, inputs, row, lambda inner, given, into: [inner.allgather([into], given, options)]
        )

    def _allgather_uneven(self, row: list[Tensor], own: Tensor) -> _Work:
        """As torch does it for NCCL: a broadcast from every member, in one operation."""
        me = self._me

        def run(inner: Any, given: list[Tensor], into: list[Tensor]) -> list[Any]:
            into[me].copy_(given[0].view_as(into[me]))
            works = []
            for root, tensor in enumerate(into):
                options = dist.BroadcastOptions()
                options.rootRank = root
                works.append(inner.broadcast([tensor], options))
            return works

        return self._whole.issue(f"all_gather {_sizes(*row)}", [own], row, run)

    def _allgather_base(self, output: Tensor, part: Tensor, options: Any = None) -> _Work:
        options = options or dist.AllgatherOptions()
        size = output.numel() // self.size()

        def run(inner: Any, given: list[Tensor], into: list[Tensor]) -> list[Any]:
            return [inner.allgather([list(into[0].view(-1).split(size))], [given[0].reshape(-1)], options)]

        return self._whole.issue(f"all_gather_into {_sizes(part)}", [part], [output], run)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> _Work:
        reduction = dist.AllreduceOptions()
        if options is not None:
            reduction.reduceOp = options.reduceOp
        ranks, me = self.size(), self._me

        def run(inner: Any, given: list[Tensor], into: list[Tensor]) -> list[Any]:
            inner.allreduce(given, reduction).wait()
            into[0].copy_(given[0].view(ranks, -1)[me].view_as(into[0]))
            return []

        return self._whole.issue(f"reduce_scatter {_sizes(whole)}", [whole], [output], run)

    def alltoall_base(
        self, output: Tensor, whole: Tensor, taken: list[int], given: list[int], options: Any = None
    ) -> _Work:
        options = options or dist.AllToAllOptions()
        return self._whole.issue(
            "all_to_all",
            [whole],
            [output],
            lambda inner, sent, into: [inner.alltoall_base(into[0], sent[0], taken, given, options)],
        )

    # the names that torch 2.13 calls them by
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> _Work:
        options = opts or dist.BarrierOptions()
        work = self._whole.issue("barrier", [], [], lambda inner, _, __: [inner.barrier(options)])
        work.wait()
        return work

    def shutdown(self) -> None:
        self.close()

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        for communicator in (self._whole, *self._pairs.values()):
            communicator.close()
