"""How fast attention over chosen keys is before anybody has measured it on the machine at hand, on CPUs and GPUs.

Times are told in FLOPs of dense attention that take as long, so that they follow the device's own speed, or in ms where
no size of a clip changes them. What they are measured on: docs/sparse_planning.md. ``arachnec profile`` replaces all
but what is told of learning.
"""

from __future__ import annotations

from dataclasses import dataclass


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
