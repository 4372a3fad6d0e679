"""Attributes of stages, cascades and clusters, typed: sizes, times, runs of layers reduced together, recomputed blocks.

Of recomputed blocks these are the first ones in the order of the model: what they save lives longest, and when the
backward comes to them, it has freed what the others saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from arachnec.ir.nodes import Cascade, Cluster, Stage, formula, integer, integers, quantity
from arachnec.ir.sampling import branches_of, planned_steps
from arachnec.ir.values import Formula, Term, Value

BYTES = {"f64": 8.0, "f32": 4.0, "bf16": 2.0, "f16": 2.0}


def shape_of(cascade: Cascade) -> tuple[object, ...]:
    """The key under which cascades cost the same."""
    measured = tuple(cascade.attrs.get(name) for name in ("times", "per_clip", "sparse", "heads", "shards"))
    sampled = planned_steps(cascade), branches_of(cascade)
    sizes = cascade.stage, cascade.phase, cascade.batch, cascade.tokens, cascade.text
    return *sizes, *measured, bool(cascade.inputs), *sampled


def times_of(cascade: Cascade) -> dict[int, float]:
    """Measured ms per degree, from a cascade's ``times``, which replaces its stage's formulas; empty without."""
    value = cascade.attrs.get("times")
    if not isinstance(value, tuple):
        return {}
    pairs = [pair for pair in value if isinstance(pair, tuple) and len(pair) == 2]
    return {integer(degree): quantity(time) for degree, time in pairs}


def clip_time(cascade: Cascade) -> float | None:
    """Measured ms per clip on one rank, from an encode cascade's ``per_clip``, which replaces the stage's formula."""
    value = cascade.attrs.get("per_clip")
    return None if value is None else quantity(value)


def crowding(cluster: Cluster) -> float:
    """How many ranks of a node share one core while all compute; 1 for GPUs and where every rank has its own."""
    cores = cluster.attrs.get("cores")
    if cores is None or cluster.attrs["device"] != "cpu":
        return 1.0
    return max(1.0, cluster.gpus / integer(cores))


def uneven(items: int, parts: int) -> float:
    """The largest share when indivisible ``items`` are split into ``parts``: 1 / parts where they divide, else more."""
    return math.ceil(items / parts) / items if items else 1.0


def shards_of(cascade: Cascade, ranks: int) -> tuple[int, ...] | None:
    """The tokens of each of a clip's ``ranks``, where the cascade lists them for so many; None where they are even."""
    listed = cascade.attrs.get("shards")
    shards = () if listed is None else integers(listed)
    return shards if len(shards) == ranks and cascade.tokens else None


def largest_share(cascade: Cascade, ranks: int) -> float:
    """The part of a clip's tokens on the rank that has most."""
    shards = shards_of(cascade, ranks)
    return uneven(cascade.tokens, ranks) if shards is None else max(shards) / cascade.tokens


def gradient_bytes(stage: Stage) -> float:
    """Bytes of a stage's gradients in its all-reduce; those of what parts share have one of their own."""
    return own_trained(stage) * gradient_element_bytes(stage) if stage.trained else 0.0


def own_trained(stage: Stage) -> int:
    """How many parameters train that no other part of the model holds."""
    return max(0, trained_count(stage) - sum(count for _, count in tied_sets(stage.attrs.get("tied"))))


def trained_count(stage: Stage) -> int:
    """How many of a stage's parameters train."""
    return count_in(stage, "trained") if "trained" in stage.attrs else count_in(stage, "params")


def element_bytes(stage: Stage) -> float:
    """Bytes of one parameter."""
    return BYTES.get(str(stage.attrs.get("dtype")), 4.0)


def gradient_element_bytes(stage: Stage) -> float:
    """Bytes of one parameter's gradient, which has a precision of its own where the stage says so."""
    return BYTES.get(gradient_precision(stage), 4.0)


def gradient_precision(stage: Stage) -> str:
    """The precision in which a stage's gradients are kept and summed."""
    return str(stage.attrs.get("gradients", stage.attrs.get("dtype", "f32")))


def token_bytes(stage: Stage, tokens: int) -> float | None:
    """Bytes of ``tokens`` tokens between two blocks, in the parameters' precision; None where ``hidden`` is unknown."""
    hidden = stage.attrs.get("hidden")
    return element_bytes(stage) * hidden * tokens if isinstance(hidden, int) else None


def count_in(stage: Stage, name: str) -> int:
    """A whole number that the stage says of itself, such as ``heads``; 0 where it says none."""
    value = stage.attrs.get(name, 0)
    return value if isinstance(value, int) else 0


def most_clips(stage: Stage) -> int | None:
    """How many clips a forward of the stage may take; None for any number."""
    value = stage.attrs.get("most_clips")
    return value if isinstance(value, int) else None


def blocks_run(stage: Stage) -> int:
    """Blocks that one forward of the stage runs; 0 where it lists none."""
    blocks = stage.attrs.get("blocks")
    if not isinstance(blocks, tuple):
        return 0
    return sum(pair[1] for pair in blocks if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int))


def formula_in(stage: Stage, name: str) -> Formula | None:
    """A formula that the stage says of itself, such as ``saved``; None where it says none."""
    value = stage.attrs.get(name)
    return None if value is None else formula(value)


def evaluated(stage: Stage, name: str, cascade: Cascade) -> float:
    """The stage's formula ``name`` for a cascade on one rank, in the formula's unit; 0 where it has none."""
    own = formula_in(stage, name)
    return own(B=cascade.batch, S=cascade.tokens, T=cascade.text) if own else 0.0


def squared(cost: Formula | None) -> float:
    """The coefficient of pairs of video tokens of one clip; 0 without a formula."""
    terms = cost.terms if cost else ()
    return math.fsum(term.coefficient for term in terms if term.powers in ((("B", 1), ("S", 2)), (("S", 2),)))


def term_value(term: Term, cascade: Cascade) -> float:
    """One term of a formula for a cascade."""
    return term.of({"B": float(cascade.batch), "S": float(cascade.tokens), "T": float(cascade.text)})


def tied_sets(value: Value | None) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The attribute ``tied`` or ``tied_layers``: which parts or layers read the same parameters, and how many train."""
    rows = value if isinstance(value, tuple) else ()
    return tuple((integers(row[0]), integer(row[1])) for row in rows if isinstance(row, tuple))


def gib(value: Value | None) -> float:
    """An attribute in GiB; 0 where it is absent."""
    return quantity(value) if value is not None else 0.0


def is_encoder(stage: Stage) -> bool:
    """Whether a stage runs for every clip, before what is trained, and hands its output on."""
    return not stage.trained and "output" in stage.attrs and "part_of" not in stage.attrs


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


def block_count(stage: Stage) -> int:
    """The stage's layers; 1 where it does not say: all or none of it is recomputed."""
    layers = stage.attrs.get("layers")
    return len(layers) if isinstance(layers, tuple) and layers else 1


def recomputed_blocks(value: Value | None, stage: Stage) -> int:
    """How many blocks ``recompute`` stands for: ``true`` for all, ``false`` and nothing for none."""
    if value is None or isinstance(value, bool):
        return block_count(stage) if value else 0
    return integer(value)


def recompute_value(blocks: int, stage: Stage) -> Value | None:
    """So many blocks as the passes write it: nothing for none, ``true`` for all."""
    if not blocks:
        return None
    return True if blocks == block_count(stage) else blocks


def recomputed_layers(value: Value | None, stage: Stage) -> frozenset[str] | bool:
    """The paths of the blocks that ``recompute`` stands for; True for all, False for none."""
    blocks = recomputed_blocks(value, stage)
    if blocks in (0, block_count(stage)):
        return blocks > 0
    return frozenset(path for path, _ in layers_of(stage)[:blocks])


def saved_by_recomputing(stage: Stage) -> tuple[tuple[int, Formula | None], ...]:
    """Runs of layers, and what recomputing each of them saves; one run without a formula where all save the same."""
    runs = stage.attrs.get("spared")
    if not isinstance(runs, tuple) or not runs:
        return ((block_count(stage), None),)
    return tuple((integer(run[0]), formula(run[1])) for run in runs if isinstance(run, tuple))
