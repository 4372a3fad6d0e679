"""What can be known of the kernels' speed without a device: compiled, counted, estimated."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from cases import Case, cases
from compile_estimate import Estimate, Recorder, estimate, specialisation
from launches import launch_all
from speed_model import Work, fraction_of_copy

from arachnec.kernels.rowwise import bias_gelu, gate_residual, norm_launch, rope_launch, row_launch

Call = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]

LAUNCHED = [
    (norm_launch, "norm_forward"),
    (norm_launch, "norm_backward"),
    (rope_launch, "rope_forward"),
    (rope_launch, "rope_backward"),
    (bias_gelu, "gelu_forward"),
    (bias_gelu, "gelu_backward"),
    (gate_residual, "gate_forward"),
    (gate_residual, "gate_backward"),
    (row_launch, "column_sums"),
]


@contextmanager
def recorded() -> Iterator[dict[str, Recorder]]:
    """Every kernel replaced by a recorder of its launches."""
    kernels = {name: getattr(module, name) for module, name in LAUNCHED}
    recorders = {name: Recorder(kernel) for name, kernel in kernels.items()}
    for module, name in LAUNCHED:
        setattr(module, name, recorders[name])
    try:
        yield recorders
    finally:
        for module, name in LAUNCHED:
            setattr(module, name, kernels[name])


def without_gpu(arguments: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """What can be known without a device: registers, shared memory and spills for compute capability 9.0, and bytes."""
    print("no CUDA device: nothing is timed. Compiled for compute capability 9.0 by Triton's own compiler:")
    print("kernel         layout   hidden | registers, spilled bytes | shared bytes, warps | resident | loop: instructions, barriers, bytes a lane reads at a time")  # fmt: skip  # noqa: E501
    compiled: dict[Any, Estimate] = {}
    results, estimates = [], []
    for hidden, layout, tokens in itertools.product(arguments.hidden, arguments.layouts, arguments.tokens):
        for case, way, calls in launches(tokens, hidden, layout, dtype):
            for name, kernel, (_, given, options) in calls:
                key = name, specialisation(kernel, given, options)
                if key not in compiled:
                    e = compiled[key] = estimate(kernel, given, options)
                    results.append(
                        {"kernel": name, "layout": layout, "hidden": hidden, "resident": e.resident} | vars(e)
                    )
                    print(f"{name:14} {layout:8} {hidden:6} | {e.registers:3}, {e.spilled:3} | {e.shared:6}, {e.warps:2} | {e.resident:2} | {e.instructions:4}, {e.barriers:2}, {e.access:2}", flush=True)  # fmt: skip  # noqa: E501
            name, kernel, call = calls[0]
            moved = getattr(bytes_of(tokens, hidden, layout, dtype)[case], f"{way}_bytes")
            fraction = fraction_of_copy(compiled[name, specialisation(kernel, *call[1:])], work_of(kernel, call, tokens * (4 if layout == "batch 4" else 1), moved))  # fmt: skip  # noqa: E501
            row = {"kernel": case, "pass": way, "layout": layout, "tokens": tokens, "hidden": hidden}
            estimates.append(row | {"bytes": moved, "estimated_of_copy": fraction})
    print("\nestimated, not measured (speed_model.py beside this): fraction of an H200's copy bandwidth; MB moved")
    for r in estimates:
        print(f"{r['kernel']:31} {r['pass']:8} {r['layout']:8} S {r['tokens']:6} H {r['hidden']:5} {r['estimated_of_copy']:6.1%} {r['bytes'] / 1e6:9.1f} MB")  # fmt: skip  # noqa: E501
    head = {"device": "none: compiled for compute capability 9.0", "triton": triton.__version__}
    return head | {"results": results, "estimates": estimates}


def bytes_of(tokens: int, hidden: int, layout: str, dtype: torch.dtype) -> dict[str, Case]:
    return {case.kernel: case for case in cases(tokens, hidden, layout, dtype, torch.device("meta"))}


def work_of(kernel: Any, call: Call, rows: int, moved: int) -> Work:
    grid, arguments, options = call
    given = {**dict(zip(kernel.arg_names, arguments, strict=False)), **options}
    at_once = given.get("ROWS", 1)
    partials = given.get("partials")
    return Work(
        programs=math.prod(grid),
        run=math.ceil(given["run"] / at_once),
        steps=max(1, rows * math.prod(grid[1:]) // at_once),
        ahead=given["STAGES"] - 1,
        moved=moved,
        partials=0 if partials is None else 4 * partials.numel(),
        rounds=math.ceil(grid[0] / row_launch.SUM_ROWS),
    )


def launches(
    tokens: int, hidden: int, layout: str, dtype: torch.dtype
) -> Iterator[tuple[str, str, list[tuple[str, Any, Call]]]]:
    """Of every case and pass the kernels that it launches, through the launchers, on tensors without storage."""
    with recorded() as recorders:
        for case, way in launch_all(tokens, hidden, layout, dtype):
            calls = [(name, recorder.kernel, call) for name, recorder in recorders.items() for call in recorder.calls]
            for recorder in recorders.values():
                recorder.calls.clear()
            yield case, way, calls
