"""The clips of an executable in another order in every epoch, dealt out into batches of the sizes it has."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from arachnec.executable.batches import Drawn, ManifestBatches, Mark
from arachnec.executable.folder import Executable, batch_sizes


@dataclass(frozen=True)
class ShuffledBatches:
    """``seed`` and the number of the epoch say the order. Every clip is in one batch of an epoch."""

    executable: Executable
    seed: int
    told: bool = False

    def draw(self, step: int) -> Drawn:
        epoch, number = divmod(step, len(self._sizes))
        ids = _order(self.seed, epoch, sum(self._sizes))[self._ends[number] - self._sizes[number] : self._ends[number]]
        planned = tuple(self.executable.traced.clips[position] for position in sorted(ids))
        clips = {clip.id: self.executable.clips[clip.id] for clip in planned}
        return Drawn(number, planned, clips, self.mark(step + 1))

    def mark(self, steps: int) -> Mark:
        in_order = self._in_order.mark(steps)
        return Mark(in_order.clips, f"{in_order.data} shuffled")  # a run in order is another one

    @cached_property
    def _in_order(self) -> ManifestBatches:
        return ManifestBatches(self.executable)

    @cached_property
    def _sizes(self) -> list[int]:
        return batch_sizes(self.executable.traced)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(self._sizes))


@lru_cache(maxsize=2)  # of this epoch, and of the next one, which is planned meanwhile
def _order(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)
