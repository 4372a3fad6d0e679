"""One block of Wan2.1, 1.3B and 14B wide: checked against eager and timed; with a device that is launch-bound too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import block_speed as speed
import torch
from acceptance.machine import Machine, Row, verdict
from torch.profiler import ProfilerActivity, profile

from arachnec.cluster.detect import find_by_driver_name
from arachnec.tracing.dims import B, S, T

LENGTHS = (256, 7800, 32760)  # the first is so short that launching takes longer than computing
REPEATS = 5
COMPILES_S = 60.0  # left, for torch.compile to be tried


def rows(machine: Machine) -> Iterator[Row]:
    dtype = torch.float32 if machine.dry else torch.bfloat16
    models = speed.TINY if machine.dry else speed.MODELS
    cases = {}
    for model, (heads, width) in models.items():
        cases[model] = speed.captured_block(heads, 16 if machine.dry else 128, width, machine.device, dtype)
        for tokens in (24, 48) if machine.dry else LENGTHS:
            for form in ("eager", "ours"):
                yield from measured(machine, model, cases[model], tokens, form, dtype)
    for model, block in cases.items():
        for form in ("torch.compile", "ours + torch.compile"):
            if machine.left > COMPILES_S and not machine.dry:
                yield from measured(machine, model, block, LENGTHS[-1], form, dtype)


def measured(
    machine: Machine, model: str, case: tuple[Any, Any], tokens: int, form: str, dtype: torch.dtype
) -> Iterator[Row]:
    block, captured = case
    torch._dynamo.reset()
    inputs = speed.inputs_of(captured, {B: 1, S: tokens, T: 16 if machine.dry else speed.CAPTION}, machine.device)
    forms = speed.forms(captured, block, machine.device)
    truth = speed.step(forms["eager"], inputs, block)
    row = {"model": model, "form": form, "tokens": tokens, "dtype": str(dtype)}
    row |= speed.checked_and_timed(forms[form], truth, inputs, block, machine.device, REPEATS)
    row |= gaps(machine, forms[form], inputs, block)
    specs = None if machine.dry else find_by_driver_name(torch.cuda.get_device_name())
    row["planned_launch_ms"] = None if specs is None else specs.block_overhead  # of a forward, however short
    yield verdict(row, "error", speed.TOLERANCE[dtype])
    machine.empty_cache()


def gaps(machine: Machine, run: Any, inputs: Sequence[Any], block: torch.nn.Module) -> Row:
    """How much of a forward and backward the device has nothing to do, queued without a wait in between.

    Where it is dry the operations of the host stand for the kernels.
    """
    activity = ProfilerActivity.CPU if machine.dry else ProfilerActivity.CUDA
    machine.synchronize()
    with profile(activities=[activity], acc_events=True) as recorded:
        started = time.perf_counter()
        speed.step(run, inputs, block)
        launched = (time.perf_counter() - started) * 1e3
        machine.synchronize()
    device = torch.autograd.DeviceType.CPU if machine.dry else torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end) for e in recorded.events() if e.device_type == device]
    span, busy = extent(spans)
    idle = 1 - busy / span if span else None
    return {"kernels": len(spans), "host_ms": launched, "span_ms": span / 1e3, "busy_ms": busy / 1e3, "idle": idle}


def extent(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """From the first start to the last end, and how much of that some span covers."""
    busy, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return (reached - min(start for start, _ in spans) if spans else 0.0), busy
