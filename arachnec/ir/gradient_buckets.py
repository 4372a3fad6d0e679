"""Runs of a stage's layers whose gradients are all-reduced together: readings of ``layers`` and ``buckets``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from arachnec.ir.nodes import Stage
from arachnec.ir.stage_sizes import gradient_bytes, gradient_element_bytes
from arachnec.ir.values import Value


@dataclass(frozen=True)
class Contents:
    """What one bucket of a stage's gradients holds: layers by number, and perhaps the rest; its size in bytes."""

    layers: tuple[int, ...]
    rest: bool
    size: int


def layers_of(stage: Stage) -> tuple[tuple[str, int], ...]:
    """Path and trained parameters of every layer of a stage, in the order they run."""
    value = stage.attrs.get("layers", ())
    assert isinstance(value, tuple)
    return tuple((str(pair[0]), _count(pair[1])) for pair in value if isinstance(pair, tuple))


def contents(stage: Stage, buckets: Sequence[int]) -> tuple[Contents, ...]:
    """The buckets that the attribute ``buckets`` of a reduce says, in the order of their starts."""
    each = gradient_element_bytes(stage)
    sizes = [count * each for _, count in layers_of(stage)]
    found: list[Contents] = []
    high = len(sizes)
    for number, count in enumerate(buckets):
        layers = tuple(range(high - count, high))
        rest = number == len(buckets) - 1
        size = sum(sizes[layer] for layer in layers)
        if rest:
            size += max(0.0, gradient_bytes(stage) - sum(sizes))
        found.append(Contents(layers, rest, round(size)))
        high -= count
    return tuple(found)


def passed(bucket: Contents, layers: int) -> float:
    """The part of a backward that is still to come when it has passed the bucket; layers are taken to cost the same."""
    return 0.0 if bucket.rest else min(bucket.layers, default=0) / layers


def _count(value: Value) -> int:
    assert isinstance(value, int)
    return value
