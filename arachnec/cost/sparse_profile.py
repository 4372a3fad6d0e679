"""What attention over chosen keys takes on a machine, by length and density, and the formulas fitted to it.

Of one head, in ms: dense attention takes a S^2 + b S, attention over chosen keys c d S^2 + e S at density d, forward
and backward apart, prediction and choice f S^2 + g S + h. Fitted by non-negative least squares on the relative error.
Out for a plan: how fast sparse kernels are beside dense ones, and what everything else about them comes to.

Before anybody has measured times are told in FLOPs of dense attention that take as long, so that they follow the
device's own speed, or in ms where no size of a clip changes them. What they are measured on: docs/sparse_planning.md.
``arachnec profile`` replaces all but what is told of learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from arachnec.ir.nodes import Stage
from arachnec.ir.stage_sizes import count_in, formula_in, squared
from arachnec.ir.values import Formula, Quantity, Term

PARTS = ("dense_forward", "dense_backward", "forward", "backward", "choice")
SLOWEST, FASTEST = 0.01, 100.0  # sparse kernels over dense ones, where one of the two was not to be seen


class AttentionTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ms of one head over ``tokens`` keys, at this ``density`` and dense."""

    tokens: int
    density: float
    dense_forward: float
    dense_backward: float
    forward: float
    backward: float
    choice: float


class SparseProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of heads of so many features. ``coefficients`` by part: ms per pair of tokens that is computed, per token, and
    always. ``residuals`` by part: (predicted - measured) / measured of each measurement."""

    head_size: int
    measurements: list[AttentionTime]
    coefficients: dict[str, list[float]]
    residuals: dict[str, list[float]]


def fit_sparse(head_size: int, measurements: Sequence[AttentionTime]) -> SparseProfile:
    """Raises ValueError without measurements, or for a time that is not positive."""
    import numpy as np
    from scipy.optimize import nnls

    if not measurements or min(getattr(run, part) for run in measurements for part in PARTS) <= 0:
        raise ValueError("a fit needs measurements with positive times")
    coefficients, residuals = {}, {}
    for part in PARTS:
        took = np.array([getattr(run, part) for run in measurements])
        rows = np.array([_basis(part, run) for run in measurements]) / took[:, None]
        scale = np.where(rows.max(axis=0) > 0, rows.max(axis=0), 1.0)
        solution = nnls(rows / scale, np.ones(len(took)))[0] / scale
        coefficients[part] = [float(value) for value in solution]
        residuals[part] = [round(float(value), 4) for value in rows @ solution - 1]
    return SparseProfile(head_size, list(measurements), coefficients, residuals)


def _basis(part: str, run: AttentionTime) -> tuple[float, float, float]:
    pairs = run.tokens**2 * (run.density if part in ("forward", "backward") else 1.0)
    return pairs, float(run.tokens), float(part == "choice")


def sparse_problem(profile: SparseProfile) -> str | None:
    """What no measurement can have come to."""
    if profile.head_size < 1 or set(profile.coefficients) != set(PARTS):
        return f"its sparse attention has heads of {profile.head_size} and parts {sorted(profile.coefficients)}"
    values = [value for row in profile.coefficients.values() for value in row]
    if any(len(row) != 3 for row in profile.coefficients.values()) or not all(0 <= v < float("inf") for v in values):
        return "a coefficient of its sparse attention is less than nothing, without end, or lacks"
    return None


def with_measured_sparsity(stage: Stage, profiles: Sequence[SparseProfile], crowd: float) -> Stage:
    """A stage with ``forward`` and ``density``, its kernels' speeds and what choosing takes as measured. As it is
    where heads of its size were not."""
    heads = count_in(stage, "heads")
    size = count_in(stage, "hidden") // max(1, heads)
    profile = next((known for known in profiles if known.head_size == size), None)
    rate = squared(formula_in(stage, "forward")) / (squared(formula_in(stage, "flops")) or 1.0)
    if profile is None or "density" not in stage.attrs or rate <= 0:
        return stage
    by = profile.coefficients
    other = sum(by[part][1] for part in ("forward", "backward")) - sum(
        by[part][1] for part in ("dense_forward", "dense_backward")
    )
    square, linear, always = by["choice"]
    tflop = heads * crowd / rate  # of one ms of a head
    terms = (
        Term(square * tflop, (("B", 1), ("S", 2))),
        Term(max(0.0, linear + other) * tflop, (("B", 1), ("S", 1))),
    )
    attrs = stage.attrs.updated(
        choice=Formula(terms, "TFLOP"),
        choice_overhead=Quantity(always * heads * crowd, "ms"),
        sparse_speed=(_speed(by, "forward"), _speed(by, "backward"), 1.0),
    )
    return replace(stage, attrs=attrs)


def _speed(by: Mapping[str, Sequence[float]], part: str) -> float:
    dense, sparse = by[f"dense_{part}"][0], by[part][0]
    return round(min(FASTEST, max(SLOWEST, dense / sparse if sparse else FASTEST)), 6)


@dataclass(frozen=True)
class KernelSpeeds:
    """Sparse over dense kernels in FLOPs a second: attention forward and backward, and prediction and choice."""

    group: int  # queries whose keys are chosen together
    forward: float
    backward: float
    choice: float
    moved: float  # FLOPs of choice in the time of putting a feature of a token in its place
    overhead: float  # ms of prediction, choice and launches of a layer, for any clip
    head_overhead: float  # ms of prediction and choice of a head, for any clip
    # Of a predictor: FLOPs of dense attention in the time in which it learns, for a head and a pair of tokens, and for
    # a feature of a token; and ms for any clip.
    learning: tuple[float, float, float]


# One thread, fp32, heads of 64: benchmarks/sparse/cpu_speed.py.
CPU = KernelSpeeds(256, 0.8, 0.8, 0.1, 410.0, 0.0, 0.72, (0.0, 11_800.0, 0.0))
# An H200, bf16, heads of 128, groups of 64: benchmarks/sparse/gpu_fit.py.
GPU = KernelSpeeds(64, 0.48, 0.476, 0.041, 556.0, 7.3, 0.0, (80.0, 0.0, 8.4))


def kernel_speeds(device: str) -> KernelSpeeds:
    """Those of a cluster's device."""
    return CPU if device == "cpu" else GPU
