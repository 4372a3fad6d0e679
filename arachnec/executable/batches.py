"""Global batches: what a step trains, and what is remembered of all that were drawn.

A batch's clips have ids in the IR. Which plan a batch can use depends on its shapes alone: ``shapes_key``. A plan that
was made for other clips of the same shapes is used with ``placed_in``: the clip that each of its ids stands for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from arachnec.data.clip import VideoClip
from arachnec.executable.folder import Executable, batch_sizes, data_digest, iteration_of
from arachnec.ir.nodes import Clip

ShapesKey = tuple[tuple[tuple[int, ...], int], ...]  # every shape, and how many clips have it


@dataclass(frozen=True)
class Mark:
    """How far a source was drawn: so many clips, their digest, and what the source says of itself as JSON."""

    clips: int
    data: str
    source: str = ""


@dataclass(frozen=True)
class Drawn:
    """One global batch. ``number`` is that of the batch in its manifest, or counts what was drawn."""

    number: int
    planned: tuple[Clip, ...]
    clips: Mapping[int, VideoClip]  # by id in the IR
    mark: Mark  # after this batch


class Batches(Protocol):
    """Where the global batches of a run come from."""

    @property
    def told(self) -> bool:
        """Whether rank 0 alone draws, and tells the other ranks."""

    def draw(self, step: int) -> Drawn | None:
        """The batch of a step; None where there are no more. Where it is told, called once a step, in order."""

    def mark(self, steps: int) -> Mark:
        """What is remembered after so many steps, of which the last may not be drawn yet."""


@dataclass(frozen=True)
class ManifestBatches:
    """The batches of an executable, again and again in the same order."""

    executable: Executable
    told: bool = False

    def draw(self, step: int) -> Drawn:
        number = step % self.executable.header.iterations
        planned = iteration_of(self.executable.traced, number).clips
        clips = {clip.id: self.executable.clips[clip.id] for clip in planned}
        return Drawn(number, planned, clips, self.mark(step + 1))

    def mark(self, steps: int) -> Mark:
        rounds, rest = divmod(steps, len(self._sizes))
        return Mark(rounds * sum(self._sizes) + sum(self._sizes[:rest]), self._digest)

    @cached_property
    def _sizes(self) -> list[int]:
        return batch_sizes(self.executable.traced)

    @cached_property
    def _digest(self) -> str:
        return data_digest(self.executable.traced, self.executable.clips)


def shapes_key(clips: Sequence[Clip]) -> ShapesKey:
    """The multiset of shapes: batches with equal keys can run the same plan."""
    return tuple(sorted(Counter(map(_shape, clips)).items()))


def placed_in(program: Sequence[Clip], drawn: Drawn) -> dict[int, VideoClip]:
    """The clip that each id of a program stands for, where both have the same shapes.

    Clips of one shape are taken in their order, so that a batch's own program has its own ids.
    """
    ids = sorted(program, key=_shape)
    own = sorted(drawn.planned, key=_shape)
    return {clip.id: drawn.clips[given.id] for clip, given in zip(ids, own, strict=True)}


def _shape(clip: Clip) -> tuple[int, ...]:
    return clip.frames, clip.height, clip.width, clip.text, clip.tokens
