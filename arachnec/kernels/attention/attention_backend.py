"""Which kernel family computes attention on a device: one choice for a grid, on plain facts.

All families return the log-sum-exp, so a ring and whole attention take the same one. Their outputs and gradients
differ by rounding. No torch here: the compiler names the family before any device is at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

FLASH2 = "flash2"  # FlashAttention 2 (arXiv 2307.08691), in torch
FLASH3 = "flash3"  # FlashAttention 3 (arXiv 2407.08608), where the user has activated it in torch
CUDNN = "cudnn"
EFFICIENT = "efficient"  # the memory-efficient kernel: the only one on GPUs that takes masks here, or fp32
CPU_FLASH = "cpu-flash"
MATH = "math"  # matrix products over tiles of rows

PREFERENCE = (FLASH3, CUDNN, FLASH2, EFFICIENT, CPU_FLASH, MATH)
HALF = ("bf16", "f16")
ALIGNMENT = 8  # elements that a row of a head must be a multiple of for the kernels on GPUs
LARGEST_HEAD = {FLASH2: 256, FLASH3: 256, CUDNN: 128}


@dataclass(frozen=True)
class Capability:
    """What a device can run. ``compute`` is CUDA's compute capability, (0, 0) elsewhere."""

    device: str  # "cpu", "cuda", or another type of torch's
    compute: tuple[int, int] = (0, 0)
    cudnn: bool = False
    flash3: bool = False  # FlashAttention 3 stands in for FlashAttention 2


def attention_backend(
    capability: Capability,
    dtype: str,
    head_size: int,
    *,
    value_size: int | None = None,
    masked: bool = False,
    preferred: str | None = None,
) -> str:
    """The best of ``PREFERENCE`` for heads of these sizes, or ``preferred`` where the device can run that.

    ``dtype`` is ``bf16``, ``f16``, ``f32`` or ``f64``; ``value_size`` None means ``head_size``.
    """
    size = head_size if value_size is None else value_size
    names = PREFERENCE if preferred is None else (preferred, *PREFERENCE)
    return next(name for name in names if _runs(name, capability, dtype, head_size, size, masked))


def _runs(name: str, capability: Capability, dtype: str, head_size: int, value_size: int, masked: bool) -> bool:
    if name == MATH:
        return True
    if name == CPU_FLASH:
        return capability.device == "cpu" and head_size == value_size
    if name not in PREFERENCE or capability.device != "cuda" or head_size % ALIGNMENT or value_size % ALIGNMENT:
        return False
    if name == EFFICIENT:
        return dtype in (*HALF, "f32")
    if masked or dtype not in HALF or not head_size == value_size <= LARGEST_HEAD[name]:
        return False
    if name == CUDNN:
        return capability.cudnn and capability.compute >= (9, 0)
    if name == FLASH3:
        return capability.flash3 and capability.compute[0] == 9
    return capability.compute >= (8, 0) and not (capability.flash3 and capability.compute[0] == 9)
