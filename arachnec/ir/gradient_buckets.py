"""Gradient buckets: runs of a stage's layers whose gradients are all-reduced together.

In: the attributes ``layers`` of a stage and ``buckets`` of its reduce. Out: a ``Bucket`` each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from arachnec.ir.nodes import Stage
from arachnec.ir.stage_sizes import gradient_bytes, gradient_element_bytes
from arachnec.ir.values import Value


@dataclass(frozen=True)
class Bucket:
    """One bucket of a stage's gradients."""

    layers: tuple[int, ...]  # by number
    rest: bool  # whether it also holds the parameters outside all layers
    size: int  # bytes


@lru_cache(maxsize=1024)
def layers_of(stage: Stage) -> tuple[tuple[str, int], ...]:
    """Path and trained parameters of every layer of a stage, in the order they run."""
    value = stage.attrs.get("layers", ())
    assert isinstance(value, tuple)
    return tuple((str(pair[0]), _count(pair[1])) for pair in value if isinstance(pair, tuple))


def buckets_of(stage: Stage, layer_counts: Sequence[int]) -> tuple[Bucket, ...]:
    """The buckets that a reduce's attribute ``buckets`` states, in the order they start."""
    sizes = [count * gradient_element_bytes(stage) for _, count in layers_of(stage)]
    buckets: list[Bucket] = []
    high = len(sizes)
    for number, count in enumerate(layer_counts):
        layers = tuple(range(high - count, high))
        rest = number == len(layer_counts) - 1
        size = sum(sizes[layer] for layer in layers)
        if rest:
            size += max(0.0, gradient_bytes(stage) - sum(sizes))
        buckets.append(Bucket(layers, rest, round(size)))
        high -= count
    return tuple(buckets)


def remaining_backward(bucket: Bucket, layers: int) -> float:
    """The share of a backward that remains once the bucket's gradients are complete. Layers count as equally long."""
    return 0.0 if bucket.rest else min(bucket.layers, default=0) / layers


def _count(value: Value) -> int:
    assert isinstance(value, int)
    return value
