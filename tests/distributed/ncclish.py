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

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.distributed.ncclish_communicator import Communicator, Work
from tests.distributed.ncclish_device import Counts, Device, Places, Settings, Watch

NAME = "ncclish"

_device: Device | None = None


def install(store: dist.Store, rank: int, world: int, settings: Settings) -> Counts:
    """Register the backend for this process. Collective only in so far as the watch of each rank reads the others'.

    ``store`` is one that all ranks share and that outlives the groups.
    """
    global _device
    counts = Counts()
    watch = Watch(dist.PrefixStore("ncclish", store), rank, world, settings.patience)
    _device = Device(settings, counts, Places(settings.kernels), watch)
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
        _device,
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group),
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


def _sizes(*tensors: Tensor) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)


class NcclishGroup(dist.ProcessGroup):
    """The communicator of the group, and one for each pair that sends outside a batch."""

    def __init__(
        self, device: Device, store: dist.Store, index: int, size: int, timeout: timedelta, ranks: list[int]
    ) -> None:
        super().__init__(index, size)
        self._name = "-".join(map(str, ranks)) if ranks else f"all {size}"
        self._ranks = ranks or list(range(size))
        self._device, self._base, self._me, self._timeout = device, store, index, timeout
        self._whole = Communicator(device, f"group {self._name}", store, index, self._ranks, timeout)
        self._pairs: dict[tuple[int, int], Communicator] = {}

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._torch_name = name  # torch's own would tell it to a backend, and there is none below

    @property
    def group_name(self) -> str:
        return self._torch_name

    def _pair(self, peer: int) -> Communicator:
        """torch makes a communicator of two at the first send or receive of a pair, whatever ``device_id`` says."""
        low, high = sorted((self._me, peer))
        if (low, high) not in self._pairs:
            ranks = [self._ranks[low], self._ranks[high]]
            name = f"pair {ranks[0]}-{ranks[1]} of {self._name}"
            self._device.counts.pairs += 1
            self._pairs[low, high] = Communicator(
                self._device, name, self._base, int(self._me == high), ranks, self._timeout
            )
        return self._pairs[low, high]

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        other = int(peer > self._me)
        said = f"send or receive {_sizes(*tensors)}"
        return self._pair(peer).issue(said, tensors, [], lambda inner, given, _: [inner.send(given, other, tag)])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        other = int(peer > self._me)
        said = f"send or receive {_sizes(*tensors)}"
        return self._pair(peer).issue(said, [], tensors, lambda inner, _, into: [inner.recv(into, other, tag)])

    def batch(self, operations: list[dist.P2POp]) -> Work:
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

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        options = options or dist.AllreduceOptions()
        said = f"all_reduce {_sizes(*tensors)}"
        return self._whole.issue(said, tensors, tensors, lambda inner, _, values: [inner.allreduce(values, options)])

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:
        said = f"broadcast from {options.rootRank} {_sizes(*tensors)}"
        return self._whole.issue(said, tensors, tensors, lambda inner, _, values: [inner.broadcast(values, options)])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Work:
        options = options or dist.AllgatherOptions()
        (row,) = outputs
        if len({tensor.numel() for tensor in row}) > 1:
            return self._allgather_uneven(row, inputs[0])
        said = f"all_gather {_sizes(*inputs)}"
        return self._whole.issue(
            said, inputs, row, lambda inner, given, into: [inner.allgather([into], given, options)]
        )

    def _allgather_uneven(self, row: list[Tensor], own: Tensor) -> Work:
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

    def _allgather_base(self, output: Tensor, part: Tensor, options: Any = None) -> Work:
        options = options or dist.AllgatherOptions()
        size = output.numel() // self.size()

        def run(inner: Any, given: list[Tensor], into: list[Tensor]) -> list[Any]:
            return [inner.allgather([list(into[0].view(-1).split(size))], [given[0].reshape(-1)], options)]

        return self._whole.issue(f"all_gather_into {_sizes(part)}", [part], [output], run)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, options: Any = None) -> Work:
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
    ) -> Work:
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

    def barrier(self, opts: Any = None) -> Work:
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
