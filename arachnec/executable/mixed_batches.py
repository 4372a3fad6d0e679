"""Several manifests mixed by weight: which clips a step trains.

Every place of a batch is drawn from one of the manifests, with a probability that goes with its weight. Each manifest
gives its clips in an order of its own, another one in every round, all of them before one comes again. All follows from
the seed and the step alone, so a resumed run goes on where it was.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from arachnec.data.clip import VideoClip, with_unique_names
from arachnec.data.manifest import Manifest, read_manifest
from arachnec.executable.batches import Drawn, ManifestBatches, Mark
from arachnec.executable.folder import Executable
from arachnec.executable.training_options import Mix, Training, bad_value
from arachnec.ir.diagnostic import UserError

CHUNK = 4096  # places whose manifests are drawn together
T = TypeVar("T")


@dataclass(frozen=True)
class Mixture:
    """Draws from lists of these ``sizes``, by ``weights``."""

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def places(self, first: int, count: int) -> list[tuple[int, int]]:
        """List and position in it of the draws from number ``first`` on."""
        chunk, inside = divmod(first, CHUNK)
        before = Counter(_before(self.seed, self.weights, chunk))
        before.update(_lists(self.seed, self.weights, chunk)[:inside])
        drawn: list[tuple[int, int]] = []
        for number in range(first, first + count):
            chunk, inside = divmod(number, CHUNK)
            chosen = _lists(self.seed, self.weights, chunk)[inside]
            turn, place = divmod(before[chosen], self.sizes[chosen])
            drawn.append((chosen, _order(self.seed, chosen, turn, self.sizes[chosen])[place]))
            before[chosen] += 1
        return drawn


@lru_cache(maxsize=8)
def _lists(seed: int, weights: tuple[float, ...], chunk: int) -> list[int]:
    return random.Random(f"mix/{seed}/{chunk}").choices(range(len(weights)), weights, k=CHUNK)


@lru_cache(maxsize=64)
def _before(seed: int, weights: tuple[float, ...], chunk: int) -> dict[int, int]:
    """How often each list was drawn from before a chunk."""
    counts: Counter[int] = Counter()
    for earlier in range(chunk):
        counts.update(random.Random(f"mix/{seed}/{earlier}").choices(range(len(weights)), weights, k=CHUNK))
    return dict(counts)


@lru_cache(maxsize=16)
def _order(seed: int, chosen: int, turn: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"mix/{seed}/{chosen}/{turn}").shuffle(order)
    return tuple(order)


def mixed_manifest(training: Training) -> Manifest:
    """All clips of the mix, each once, in batches of its size; those of the first step come first.

    A clip's id begins with the name of its manifest. Raises ``UserError`` as ``read_manifest`` does.
    """
    mix = training.mix
    lists = [
        _in_order(_named(name, _read(source.data, training.columns)))
        for name, source in zip(_names(mix), mix.manifests, strict=True)
    ]
    named = iter(with_unique_names([clip for clips in lists for clip in clips]))
    lists = [[next(named) for _ in clips] for clips in lists]
    first = [lists[chosen][place] for chosen, place in _mixture(training, lists).places(0, mix.batch)]
    begin = list({str(clip.id): clip for clip in first}.values())
    known = {str(clip.id) for clip in begin}
    rest = [clip for clips in lists for clip in clips if str(clip.id) not in known]
    batches = [tuple(rest[i : i + mix.batch]) for i in range(0, len(rest), mix.batch)]
    return Manifest((tuple(begin), *batches), Path(mix.manifests[0].data))


def _read(path: str, columns: str) -> Sequence[VideoClip]:
    manifest = read_manifest(path, columns=columns)
    if len(manifest.iterations) > 1:
        reason = "its rows have `iteration`, and a mix draws its own batches"
        raise UserError(bad_value("mix.manifests", path, reason, "leave `iteration` out of that manifest"))
    return manifest.clips


def _named(name: str, clips: Sequence[VideoClip]) -> list[VideoClip]:
    return [replace(clip, id=f"{name}/{clip.id}") for clip in clips]


def _names(mix: Mix) -> list[str]:
    """Of each manifest its file's, and its number where two have the same."""
    stems = [Path(source.data).stem for source in mix.manifests]
    return [stem if stems.count(stem) == 1 else f"{stem}-{number}" for number, stem in enumerate(stems)]


def _in_order(clips: Sequence[VideoClip]) -> list[VideoClip]:
    """One order wherever they stand in an executable."""
    return sorted(clips, key=lambda clip: str(clip.id))


def _mixture(training: Training, lists: Sequence[Sequence[T]]) -> Mixture:
    weights = tuple(source.weight for source in training.mix.manifests)
    return Mixture(training.seed, tuple(map(len, lists)), weights)


@dataclass(frozen=True)
class MixedBatches:
    """The batches of an executable that was compiled with a mix. A clip that is drawn twice for one batch counts twice,
    with noise of its own each time."""

    executable: Executable
    training: Training
    told: bool = False

    def draw(self, step: int) -> Drawn:
        size = self.training.mix.batch
        ids = [self._lists[chosen][place] for chosen, place in self._mixture.places(step * size, size)]
        seen: Counter[int] = Counter()
        planned, clips = [], {}
        for number, id in enumerate(ids):
            clip = self.executable.clips[id]
            if seen[id]:
                clip = replace(clip, id=f"{clip.id}#{seen[id]}", title=f"{clip.name}#{seen[id]}")
            clips[number] = clip
            seen[id] += 1
            ir = self.executable.traced.clips[id]
            planned.append(replace(ir, id=number, attrs=ir.attrs.updated(iteration=step, name=clips[number].name)))
        return Drawn(step, tuple(planned), clips, self.mark(step + 1))

    def mark(self, steps: int) -> Mark:
        return Mark(steps * self.training.mix.batch, self._digest)

    @cached_property
    def _digest(self) -> str:
        weights = ",".join(str(source.weight) for source in self.training.mix.manifests)
        whole = ManifestBatches(self.executable).mark(0).data
        return f"{whole} mixed {self.training.seed} {weights}"

    @cached_property
    def _lists(self) -> list[list[int]]:
        """The clips of each manifest, by their ids in the IR, in ``_in_order``."""
        lists = []
        for name in _names(self.training.mix):
            own = [n for n, clip in enumerate(self.executable.clips) if str(clip.id).startswith(f"{name}/")]
            lists.append(sorted(own, key=lambda n: str(self.executable.clips[n].id)))
        return lists

    @cached_property
    def _mixture(self) -> Mixture:
        return _mixture(self.training, self._lists)
