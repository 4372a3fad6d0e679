"""What a cascade, its stage and its cluster say of their sizes: plain readings of their attributes.

``arachnec.cost.model`` makes time and memory of them.
"""

from __future__ import annotations

import math

from arachnec.ir.nodes import Cascade, Cluster, Stage, integer, quantity

BYTES = {"f64": 8.0, "f32": 4.0, "bf16": 2.0, "f16": 2.0}


def shape_of(cascade: Cascade) -> tuple[object, ...]:
    """What two cascades must share to cost the same."""
    measured = cascade.attrs.get("times"), cascade.attrs.get("per_clip")
    return cascade.stage, cascade.phase, cascade.batch, cascade.tokens, cascade.text, *measured, bool(cascade.inputs)


def times_of(cascade: Cascade) -> dict[int, float]:
    """The measured ms per degree that stand on a cascade instead of its stage's formulas; empty without."""
    value = cascade.attrs.get("times")
    if not isinstance(value, tuple):
        return {}
    pairs = [pair for pair in value if isinstance(pair, tuple) and len(pair) == 2]
    return {integer(degree): quantity(time) for degree, time in pairs}


def clip_time(cascade: Cascade) -> float | None:
    """The measured ms of each of an encoder's clips, on one rank, that stand instead of its stage's formula."""
    value = cascade.attrs.get("per_clip")
    return None if value is None else quantity(value)


def considered(legal: tuple[int, ...]) -> tuple[int, ...]:
    """Of ascending degrees all up to 64, multiples of 8 up to 256, multiples of 32 beyond, and the last."""
    return tuple(
        degree for degree in legal if degree <= 64 or degree == legal[-1] or degree % (8 if degree <= 256 else 32) == 0
    )


def crowding(cluster: Cluster) -> float:
    """How many ranks of a node share a core while all of them compute; 1 for GPUs, or where each has its own."""
    cores = cluster.attrs.get("cores")
    if cores is None or cluster.attrs["device"] != "cpu":
        return 1.0
    return max(1.0, cluster.gpus / integer(cores))


def uneven(things: int, parts: int) -> float:
    """The largest share of any part when whole things are dealt out: 1/parts where they divide, more where not."""
    return math.ceil(things / parts) / things if things else 1.0


def gradient_bytes(stage: Stage) -> float:
    """Bytes of a stage's gradients as they are summed over ranks."""
    return trained_count(stage) * gradient_element_bytes(stage) if stage.trained else 0.0


def trained_bytes(stage: Stage) -> float:
    """Bytes of a stage's parameters that train, in their own precision."""
    return element_bytes(stage) * trained_count(stage)


def trained_count(stage: Stage) -> int:
    """How many of a stage's parameters train."""
    count = stage.attrs.get("trained", stage.attrs.get("params", 0))
    return count if isinstance(count, int) else 0


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
    """Bytes of so many tokens between two blocks, in the parameters' precision; None where their width is not known."""
    hidden = stage.attrs.get("hidden")
    return element_bytes(stage) * hidden * tokens if isinstance(hidden, int) else None
