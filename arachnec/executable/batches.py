"""Global batches: what a step trains, and what is remembered of all that were drawn.

A batch's clips have ids in the IR. Which plan a batch can use depends on its shapes alone: ``shapes_key``. A plan that
was made for other clips of the same shapes is used with ``placed_in``: the clip that each of its ids stands for.

In a mix every place of a batch is drawn from one of the manifests, with a probability that goes with its weight. Each
manifest gives its clips in an order of its own, another one in every round, all of them before one comes again. All
follows from the seed and the step alone, so a resumed run goes on where it was.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar

from arachnec.cluster.topology import machines
from arachnec.data.clip import VideoClip, with_unique_names
from arachnec.data.manifest import Batch, Manifest, read_manifest
from arachnec.data.stratified import stratified
from arachnec.executable.folder import Executable, batch_sizes, data_digest, iteration_of
from arachnec.executable.training_options import Mix, Training, bad_value
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Clip, Cluster

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


@dataclass(frozen=True)
class ShuffledBatches:
    """``seed`` and the number of the epoch say the order. Every clip is in one batch of an epoch."""

    executable: Executable
    seed: int
    told: bool = False

    def draw(self, step: int) -> Drawn:
        epoch, number = divmod(step, len(self._sizes))
        ids = _order_of_epoch(self.seed, epoch, sum(self._sizes))[
            self._ends[number] - self._sizes[number] : self._ends[number]
        ]
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
def _order_of_epoch(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


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
        return tuple(map(_shape, self.executable.traced.clips))


@lru_cache(maxsize=2)  # of this epoch, and of the next one, which is planned meanwhile
def _dealt(seed: int, epoch: int, shapes: tuple[tuple[int, ...], ...], batches: int) -> tuple[tuple[int, ...], ...]:
    rng = random.Random(f"stratified/{seed}/{epoch}")
    dealt = stratified(shapes, batches, rng)
    rng.shuffle(dealt)
    return tuple(map(tuple, dealt))


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
            drawn.append((chosen, _order_of_list(self.seed, chosen, turn, self.sizes[chosen])[place]))
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
def _order_of_list(seed: int, chosen: int, turn: int, count: int) -> tuple[int, ...]:
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


TOKEN_PIXELS = 4 * 16 * 16  # of a video VAE with strides 4 x 8 x 8 and patches of 2 x 2
TOKEN_BYTES = 140e3  # activations of a token while a transformer of 14B parameters is trained, blocks recomputed


def require_batch(manifest: Manifest, batch: Batch, cluster: Cluster) -> Manifest:
    """The manifest itself. Raises ``UserError`` where its clips are real, and neither it nor ``batch`` says how many
    make a global batch."""
    real = any(clip.path is not None or clip.cached for clip in manifest.clips)
    if batch is None and not manifest.grouped and real:
        raise _no_batch(manifest, cluster)
    return manifest


def _no_batch(manifest: Manifest, cluster: Cluster) -> UserError:
    """Proposes as many clips as the devices can train at once, if each needs half of their memory at most for its
    activations."""
    clips = manifest.clips
    tokens = statistics.median(clip.frames * clip.height * clip.width for clip in clips) / TOKEN_PIXELS
    memory = min(node.memory for node in machines(cluster)) * 2**30
    ranks = max(1, math.ceil(tokens * TOKEN_BYTES / (memory / 2)))
    size = min(max(1, cluster.world // ranks), len(clips))
    reason = f"a clip for {'each device' if ranks == 1 else f'every {ranks} devices'} of this cluster"
    return user_error(
        f"`{manifest.path}` lists {counted(len(clips), 'clip')}, and nothing says how many of them make a global batch",
        help=f"give --batch N, such as --batch {size}: {reason}; --batch all makes one step of all of them",
    )
