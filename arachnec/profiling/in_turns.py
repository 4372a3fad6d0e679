"""Which micro-batches are measured, and in which order: in a budget of seconds, the most telling ones first.

Every rank takes part in every decision, so that all decide alike. In: jobs, and how one is run. Out: their times.

A convolution is efficient at one size and not at another, so that an encoder's time is no formula of sizes. But clips
come in buckets, of few sizes, and each is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

import torch
from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.runtime.agreement import gather

SHAPES = 7  # clip shapes measured on one rank, from the shortest to the longest
BATCHES = (4, 2)  # of the shortest and of a middle shape, once more, to tell the cost of a clip from that of a call
ENCODED_SHAPES = 32  # clips that an encoder takes different times for, where the budget allows
# the sizes of a clip as a profile names them, and what of a clip goes with each
FIELDS = {"frames": ("frames",), "height": ("height",), "width": ("width",), "text": ("text_tokens", "caption")}


@dataclass(frozen=True)
class Point:
    """A micro-batch to measure."""

    clips: tuple[VideoClip, ...]
    tokens: int


def choose_points(clips: Sequence[VideoClip], tokens: Sequence[int]) -> list[Point]:
    """Clips of up to ``SHAPES`` shapes spread over the range of tokens; last, batches of a short and a middle one."""
    points = spread(_of_every_shape(clips, tokens), SHAPES)
    batched = zip((points[0], points[len(points) // 2]), BATCHES, strict=True)  # one shape is measured in both
    return [*points, *(Point(point.clips * count, point.tokens) for point, count in batched)]


def more_points(
    clips: Sequence[VideoClip], tokens: Sequence[int], deciding: Sequence[str], chosen: Sequence[Point]
) -> list[Point]:
    """Further clips for an encoder, one for each value of its ``deciding`` sizes that no point so far has.

    With those there are they are up to ``ENCODED_SHAPES``, spread over the range of tokens.
    """
    chosen_sizes = {tuple(sizes_of(point.clips[0], deciding).values()) for point in chosen}
    further: dict[tuple[int, ...], Point] = {}
    for point in _of_every_shape(clips, tokens):
        key = tuple(sizes_of(point.clips[0], deciding).values())
        if key not in chosen_sizes:
            further.setdefault(key, point)
    return spread(list(further.values()), ENCODED_SHAPES - len(chosen_sizes))


def spread(points: Sequence[Point], count: int) -> list[Point]:
    """Up to ``count`` of the points, evenly from the first to the last."""
    last = len(points) - 1
    return [points[i] for i in sorted({round(i * last / max(1, count - 1)) for i in range(count)})] if points else []


def deciding_sizes(encoder: nn.Module, clips: Sequence[VideoClip]) -> tuple[str, ...]:
    """Those of a clip's sizes that change the shape of what the encoder is given, and so its time.

    Asked of ``load`` on the meta device, for the first clip with each size in turn as small and as large as the data
    have it: a VAE is given frames, heights and widths, a text encoder the caption's tokens, or always as many.
    """
    load = encoder.load
    assert callable(load)

    def loaded(clip: VideoClip) -> tuple[int, ...]:
        return tuple(load(clip, torch.device("meta")).shape)

    first, deciding = clips[0], []
    usual = loaded(first)
    for name, fields in FIELDS.items():
        of_size = attrgetter(fields[0])
        for end in (min(clips, key=of_size), max(clips, key=of_size)):
            resized = replace(first, **{field: getattr(end, field) for field in fields})
            if name not in deciding and loaded(resized) != usual:
                deciding.append(name)
    return tuple(deciding)


def sizes_of(clip: VideoClip, names: Sequence[str]) -> dict[str, int]:
    """These of a clip's sizes, by the names that a profile has for them."""
    return {name: getattr(clip, FIELDS[name][0]) for name in names}


def _of_every_shape(clips: Sequence[VideoClip], tokens: Sequence[int]) -> list[Point]:
    """One clip of every shape, in the order of their tokens."""
    of_shape = {clip.shape: Point((clip,), count) for clip, count in zip(clips, tokens, strict=True)}
    return sorted(of_shape.values(), key=lambda point: (point.tokens, point.clips[0].text_tokens))


SECONDS = 120.0  # of a profile
MOST_ROUNDS = 15
Times = TypeVar("Times")


@dataclass(frozen=True)
class Budget:
    """``seconds`` from now on."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """On the rank with the fewest; collective."""
        own = torch.tensor([self.started + self.seconds - time.monotonic()], dtype=torch.float64)
        return min(float(value) for value in gather(own))


@dataclass(frozen=True)
class Turn:
    """What is known of a job before it has run: its ``kind``, the point that it is of, and what it is, in words.

    A job without a point is of no size, and always measured. One that is ``extra`` comes after all others.
    """

    kind: tuple[object, ...]
    point: Point | None
    doing: str
    extra: bool = False


def in_turns(
    turns: Sequence[Turn],
    run: Callable[[int], Times],
    budget: Budget,
    reporter: Reporter = unreported,
    keep: Callable[[list[list[Times]]], None] = lambda times: None,
) -> list[list[Times]]:
    """The times of every job, in the order of ``turns``; none of a job for which there was no time.

    The shortest point is always measured, then the longest, then the one that is farthest from all measured so far;
    then the extra jobs in their order. A job that is not expected to fit into the budget is left out. Then rounds over
    all that were measured, as many as there is time for. A first time warms up: it counts where it is the only one.
    ``keep`` is given all times after every job once what is always measured is there.
    """
    times: list[list[Times]] = [[] for _ in turns]
    seconds: dict[int, float] = {}  # of a job's last run
    order, always = telling_order(turns)
    for number, index in enumerate(order):
        left = budget.left()
        if number >= always and expected_s(turns, index, seconds) > left:
            continue
        reporter(f"measuring {number + 1} of {len(order)}: {turns[index].doing}, {max(0.0, left):.0f} s left")
        for _ in range(2):
            seconds[index] = _longest(lambda index=index: times[index].append(run(index)))  # type: ignore[misc]
            if seconds[index] > budget.left():
                break
        if number + 1 >= always:
            keep(counted(times))
    done = [index for index in range(len(turns)) if times[index]]
    for number in range(2, MOST_ROUNDS):
        left = budget.left()
        if sum(seconds.values()) > left:
            break
        reporter(f"measuring all again, round {number} of up to {MOST_ROUNDS - 1}, {left:.0f} s left")
        for index in done:
            seconds[index] = _longest(lambda index=index: times[index].append(run(index)))  # type: ignore[misc]
        keep(counted(times))
    return counted(times)


def counted(times: Sequence[Sequence[Times]]) -> list[list[Times]]:
    """Without each job's first time, where it has others."""
    return [list(runs[1:] or runs) for runs in times]


def telling_order(turns: Sequence[Turn]) -> tuple[list[int], int]:
    """The jobs in the order in which they tell most, and how many of them are always run.

    Those of the shortest point, those without one, those of the longest point, and so on: each next point is the
    farthest from all before, by the logarithms of its tokens and its clips.
    """
    places = {_place(turn.point) for turn in turns if turn.point is not None and not turn.extra}
    ordered = sorted(places)
    chosen = ordered[:1]
    rest = sorted(set(ordered[1:]), key=lambda place: (place[1] == 0.0, place[0]))  # the longest single clip is last
    while rest:
        last = len(chosen) == 1
        following = rest[-1] if last else max(rest, key=lambda p: min(math.dist(p, other) for other in chosen))
        rest.remove(following)
        chosen.append(following)
    of_place = {
        place: [i for i, t in enumerate(turns) if t.point and not t.extra and _place(t.point) == place]
        for place in chosen
    }
    ends = [index for index, turn in enumerate(turns) if turn.point is None]
    first = [*of_place.get(chosen[0], []), *ends] if chosen else ends
    extra = [index for index, turn in enumerate(turns) if turn.extra]
    return [*first, *(index for place in chosen[1:] for index in of_place[place]), *extra], len(first)


def _place(point: Point) -> tuple[float, float]:
    return math.log(max(1, point.tokens)), math.log(len(point.clips))


def expected_s(turns: Sequence[Turn], index: int, seconds: dict[int, float]) -> float:
    """What a job will take, by the nearest of its kind: longer ones by the square of their size; 0 where none ran."""
    point = turns[index].point
    if point is None:
        return 0.0
    own = point.tokens * len(point.clips)
    sizes = {
        other: turn.point.tokens * len(turn.point.clips)
        for other, turn in enumerate(turns)
        if other in seconds and turn.kind == turns[index].kind and turn.point is not None
    }
    if not sizes:
        return 0.0
    nearest = min(sizes, key=lambda other: abs(math.log(own / sizes[other])))
    ratio = own / sizes[nearest]
    return seconds[nearest] * (ratio**2 if ratio > 1 else ratio)


def _longest(work: Callable[[], object]) -> float:
    """Seconds that this work takes on the rank that is last; collective."""
    started = time.perf_counter()
    work()
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    return max(float(value) for value in gather(took))
