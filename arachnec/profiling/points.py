"""Which micro-batches are measured: few of a trained stage, whose time is a formula of its tokens, many of an encoder.

A convolution is efficient at one size and not at another, so that an encoder's time is no formula of sizes. But clips
come in buckets, of few sizes, and each is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import nn

from arachnec.data.clip import VideoClip

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
