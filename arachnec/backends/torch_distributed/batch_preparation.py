"""The batches of coming forwards, made in a thread of their own while the device computes.

Noise, ``sample`` and the copy to the device take the host's time; none of it may stand between two cascades.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from arachnec.ir.nodes import Cascade
from arachnec.runtime.device_runtime import DeviceCopy

AHEAD = 1  # batches on the device beside the one in use


class BatchPreparation:
    """The batches of one rank's iteration, in the order of its forwards."""

    def __init__(
        self, thread: ThreadPoolExecutor, prepare: Callable[[Cascade], DeviceCopy], order: Sequence[Cascade]
    ) -> None:
        self._thread = thread
        self._prepare = prepare
        self._todo = list(order)
        self._under_way: dict[str, Future[DeviceCopy]] = {}

    def start(self, known: Collection[str]) -> None:
        """Have the next ones made whose inputs are ``known``: here, or on their way."""
        while self._todo and len(self._under_way) < AHEAD and all(name in known for name in self._todo[0].inputs):
            cascade = self._todo.pop(0)
            self._under_way[cascade.name] = self._thread.submit(self._prepare, cascade)

    def take(self, cascade: str, known: Collection[str]) -> DeviceCopy:
        """A batch by its cascade, waited for; raises what went wrong with it. The next one is started."""
        batch = self._under_way.pop(cascade)
        self.start(known)
        return batch.result()
