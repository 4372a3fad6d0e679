"""The clips of an executable in batches that each have their share of every shape, others in every epoch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache

from arachnec.data.stratified import stratified
from arachnec.executable.batches import Drawn, ManifestBatches, Mark
from arachnec.executable.folder import Executable, batch_sizes


@dataclass(frozen=True)
class StratifiedBatches:
    """``seed`` and the number of the epoch say the order. Every clip is in one batch of an epoch."""

    executable: Executable
    seed: int
    told: bool = False

    def draw(self, step: int) -> Drawn:
        epoch, number = divmod(step, self._count)
        planned = tuple(self.executable.traced.clips[position] for position in sorted(self._batches(epoch)[number]))
        clips = {clip.id: self.executable.clips[clip.id] for clip in planned}
        return Drawn(number, planned, clips, self.mark(step + 1))

    def mark(self, steps: int) -> Mark:
        epoch, number = divmod(steps, self._count)
        drawn = sum(map(len, self._batches(epoch)[:number])) + epoch * len(self._shapes)
        whole = ManifestBatches(self.executable).mark(0).data
        return Mark(drawn, f"{whole} stratified")  # a run in another order is another one

    def _batches(self, epoch: int) -> tuple[tuple[int, ...], ...]:
        return _dealt(self.seed, epoch, self._shapes, self._count)

    @cached_property
    def _count(self) -> int:
        return len(batch_sizes(self.executable.traced))

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((c.frames, c.height, c.width, c.text, c.tokens) for c in self.executable.traced.clips)


@lru_cache(maxsize=2)  # of this epoch, and of the next one, which is planned meanwhile
def _dealt(seed: int, epoch: int, shapes: tuple[tuple[int, ...], ...], batches: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(f"stratified/{seed}/{epoch}")
    dealt = stratified(shapes, batches, rng)
    rng.shuffle(dealt)
    return tuple(map(tuple, dealt))
