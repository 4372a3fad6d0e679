"""How far a formula is from the steps of sampling that a profile timed.

A formula is linear in its batch. A forward of several predictions is not: it can take less than their number times one,
or more. So a step of a size that was timed takes what was measured, between two batches what lies between them, and
beyond the largest batch as much more than the formula says as that one does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from arachnec.ir.nodes import Cascade, Phase, Stage, integer, quantity
from arachnec.ir.sampling import as_forward


@dataclass(frozen=True)
class TimedStep:
    """``batch`` predictions of ``tokens`` and ``text`` tokens on ``degree`` ranks of a node (``widest_ulysses``)."""

    degree: int
    batch: int
    tokens: int
    text: int
    ms: float


def timed_steps(stage: Stage) -> tuple[TimedStep, ...]:
    """What a stage says of it; none where no profile did."""
    rows = stage.attrs.get("timed", ())
    assert isinstance(rows, tuple)
    steps = []
    for row in (row for row in rows if isinstance(row, tuple)):
        degree, batch, tokens, text = (integer(size) for size in row[:4])
        steps.append(TimedStep(degree, batch, tokens, text, quantity(row[4])))
    return tuple(steps)


def correction(
    cascade: Cascade, degree: int, rows: Sequence[TimedStep], predicted: Callable[[Cascade, int], float]
) -> float:
    """What a step of a ``denoise`` takes over what is ``predicted`` for a cascade of one step, on so many ranks.

    At a degree that was not timed, what a batch costs on one rank counts.
    """
    if cascade.phase is not Phase.DENOISE:
        return 1.0
    whole = as_forward(cascade)
    same = [row for row in rows if (row.tokens, row.text) == (cascade.tokens, cascade.text)]
    own = [row for row in same if row.degree == degree] or [row for row in same if row.degree == 1]
    ratios = []
    for row in sorted(own, key=lambda row: row.batch):
        one = replace(whole, batch=row.batch).with_attrs(steps=(0, 0), planned=None)
        ratios.append((row.batch, row.ms / predicted(one, row.degree)))
    return interpolated(ratios, whole.batch)


def interpolated(points: Sequence[tuple[int, float]], at: int) -> float:
    """Linear between points that ascend, constant outside; 1 without points."""
    if not points:
        return 1.0
    place = bisect_left(points, at, key=lambda point: point[0])
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (low, first), (high, second) = points[place - 1], points[place]
    return first + (second - first) * (at - low) / (high - low)
