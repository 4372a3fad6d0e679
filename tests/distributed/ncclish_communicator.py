"""A communicator: operations of some ranks one after another, on a stream of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.distributed.ncclish_device import Device


class Mismatch(RuntimeError):
    """The members of one operation called different ones."""


@dataclass
class State:
    """How far an operation is: what its stream knows of it."""

    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Work(dist.Work):
    """An operation on its way. It keeps its tensors until it is waited for, as torch's NCCL works do."""

    def __init__(self, device: Device, name: str, state: State, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        super().__init__()
        written = {tensor.untyped_storage().data_ptr() for tensor in outputs}  # in place, which NCCL allows
        self._device, self._name, self._state, self._held = device, name, state, [*inputs, *outputs]
        self._read = [
            (tensor, tensor._version) for tensor in inputs if tensor.untyped_storage().data_ptr() not in written
        ]

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        if not self._state.done.is_set():
            self._device.counts.host_waits += 1
        while not self._state.done.wait(0.05):
            self._device.watch.check()
        if self._state.error is not None:
            raise self._state.error
        if any(tensor._version != version for tensor, version in self._read):
            self._device.counts.written_in_flight.append(self._name)
        self._held, self._read = [], []
        return True

    def is_completed(self) -> bool:
        return self._state.done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._state.error is None


class Communicator:
    """Operations of some ranks, one after another, on a thread of its own: its stream."""

    def __init__(
        self, device: Device, name: str, store: dist.Store, index: int, ranks: list[int], timeout: timedelta
    ) -> None:
        self.name, self.ranks, self._index, self._device = name, ranks, index, device
        self._store = dist.PrefixStore(f"{name}/", store)
        self._timeout = timeout
        self._inner: dist.ProcessGroupGloo | None = None
        self._issued = 0
        self._queue: list[Operation] = []
        self._more = threading.Condition()
        self._ended = False
        device.counts.communicators += 1
        if device.settings.eager:
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
    ) -> Work:
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
        operation = Operation(
            self,
            f"{says} #{number} on {self.name}",
            f"op/{number}" if meets else None,
            says,
            device.kernels.ticket(),
            run,
            [copies[id(tensor)] for tensor in inputs],
            [(Left(tensor), copies[id(tensor)]) for tensor in outputs],
        )
        with self._more:
            self._queue.append(operation)
            self._more.notify()
        return Work(device, operation.name, operation.state, inputs, outputs)

    def execute(self, operation: Operation) -> None:
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
class Operation:
    """What a communicator does next: copies of what goes in, and where what comes out belongs."""

    communicator: Communicator
    name: str
    meets: str | None  # the key under which its members compare what they called
    says: str
    ticket: int
    run: Callable[[Any, list[Tensor], list[Tensor]], list[Any]]
    inputs: list[Tensor]
    outputs: list[tuple[Left, Tensor]]
    state: State = field(default_factory=State)


class Left:
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
