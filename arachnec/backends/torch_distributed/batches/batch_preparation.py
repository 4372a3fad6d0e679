"""The batches of coming forwards: made while the device computes, or while the rank waits.

Noise, ``sample`` and the copy to the device take the host's time; none of it may stand between two cascades. A thread
of its own makes them. CPU ranks without a core to spare have none: a thread would only take turns with the training, so
there the rank makes the next batch before it waits for another rank. What several stages of a rank read of one
micro-batch is made once, and kept on the host until the last of them has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.ir.nodes import Cascade
from arachnec.runtime.device_runtime import DeviceCopy, OnHost

AHEAD = 1  # batches on the device beside the one in use


@dataclass(frozen=True)
class HostBatch:
    """The arguments and the target of one micro-batch on the host, and the numbers of its clips that can be used."""

    arguments: dict[str, Any]
    target: Tensor
    kept: list[int]

    def versions(self) -> list[int]:
        """They change where a model changes one of its arguments in place."""
        leaves = pytree.tree_leaves((self.arguments, self.target))
        return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


Prepared = tuple[DeviceCopy, list[int]]
Key = tuple[tuple[int, ...], tuple[str, ...]]  # the clips and the encoders' cascades that a batch is made of


class BatchPreparation:
    """The batches of one rank's iteration, in the order of its forwards. Without a ``thread`` they are made here."""

    def __init__(
        self,
        thread: ThreadPoolExecutor | None,
        make: Callable[[Cascade], HostBatch],
        to_device: Callable[[object], DeviceCopy],
        order: Sequence[Cascade],
    ) -> None:
        self._thread = thread
        self._make = make
        self._to_device = to_device
        self._todo = list(order)
        self._uses = Counter(map(_key, order))
        self._shared: dict[Key, tuple[HostBatch, list[int]]] = {}  # with their versions
        self._under_way: dict[str, Future[Prepared]] = {}
        self._here: dict[str, Prepared] = {}

    def start(self, known: Mapping[str, OnHost]) -> None:
        """Have the thread make the next ones whose inputs are ``known``: here, or on their way."""
        while self._thread and self._may_begin() and all(name in known for name in self._todo[0].inputs):
            cascade = self._todo.pop(0)
            self._under_way[cascade.name] = self._thread.submit(self._prepare, cascade)

    def waiting(self, known: Mapping[str, OnHost]) -> None:
        """The rank is about to wait: without a thread the next one is made now, where all its inputs are here."""
        here = (name in known and known[name].ready for name in (self._todo[0].inputs if self._todo else ()))
        if self._thread is None and self._may_begin() and all(here):
            cascade = self._todo.pop(0)
            self._here[cascade.name] = self._prepare(cascade)

    def take(self, cascade: str, known: Mapping[str, OnHost]) -> Prepared:
        """A batch by its cascade, waited for; raises what went wrong with it. The thread begins the next one."""
        if self._thread is None:
            if cascade not in self._here:
                self._here[cascade] = self._prepare(self._todo.pop(0))
            return self._here.pop(cascade)
        batch = self._under_way.pop(cascade)
        self.start(known)
        return batch.result()

    @property
    def done(self) -> bool:
        """Whether all were taken."""
        return not (self._todo or self._under_way or self._here)

    def _may_begin(self) -> bool:
        return bool(self._todo) and len(self._under_way) + len(self._here) < AHEAD

    def _prepare(self, cascade: Cascade) -> Prepared:
        key = _key(cascade)
        batch, versions = self._shared.pop(key, (None, None))
        if batch is None or batch.versions() != versions:
            batch = self._make(cascade)
        self._uses[key] -= 1
        if self._uses[key]:
            self._shared[key] = batch, batch.versions()
        return self._to_device((batch.arguments, batch.target)), batch.kept


def _key(cascade: Cascade) -> Key:
    return cascade.clips, tuple(cascade.inputs)
