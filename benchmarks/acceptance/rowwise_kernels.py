"""Every row-wise kernel against float64, and timed beside eager: what ``benchmarks/kernels`` does, in less time."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from acceptance.machine import Machine, Row, verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
import speed
from cases import KERNELS, LAYOUTS, cases

HIDDEN, TOKENS = (1536, 5120), 32760
DTYPES = (torch.bfloat16, torch.float32)


class HostStopwatch:
    """Stands for the stopwatch of a GPU where there is none: one call by the host's clock."""

    def ms(self, run: Callable[[], Any]) -> float:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3

    def copy_ms(self, moved: int, bandwidth: float) -> float:
        return moved / bandwidth * 1e3


def rows(machine: Machine) -> Iterator[Row]:
    device = machine.device
    for dtype, hidden, layout in itertools.product(DTYPES, (256,) if machine.dry else HIDDEN, LAYOUTS):
        tokens = 64 if machine.dry else speed.CHECKED[layout]
        for name in KERNELS:
            (case,) = cases(tokens, hidden, layout, dtype, device, (name,))
            row = {"kernel": name, "layout": layout, "hidden": hidden, "tokens": tokens, "dtype": str(dtype)}
            yield verdict({**row, "error": max(speed.errors(case))}, "error", speed.TOLERANCE[dtype])
            del case
        machine.empty_cache()
    stopwatch = HostStopwatch() if machine.dry else speed.Stopwatch(device)
    copy = 1e10 if machine.dry else stopwatch.copy_bandwidth()
    yield {"copy_bytes_per_second": copy}
    for hidden, layout in itertools.product((256,) if machine.dry else HIDDEN, LAYOUTS):
        for case in cases(64 if machine.dry else TOKENS, hidden, layout, torch.bfloat16, device):
            row = speed.measure(case, stopwatch, copy, machine.end)
            yield {**row, "right": "fused" not in row["left_out"]}
            del case
            machine.empty_cache()
