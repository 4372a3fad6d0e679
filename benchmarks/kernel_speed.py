"""Checks and times the Triton kernels; prints the fraction of the measured copy bandwidth each one reaches.

    python benchmarks/kernel_speed.py --output benchmarks/results/kernels.json     # on a GPU: check, time, keep
    python benchmarks/kernel_speed.py --tune                                       # on a GPU: search the launches
    python benchmarks/kernel_speed.py                                              # elsewhere: registers and bytes only

A time is the median of triton.testing.do_bench, with a cold L2 cache and what PyTorch takes to launch included. The
fraction is the bytes that one pass must move, over the time, over what a copy of 1 GiB moves in a second. Beside the
kernels: eager, torch.compile with max-autotune at the sizes of --compile-at, and Liger's layer norm where installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where arachnec is not installed
sys.path.insert(0, str(Path(__file__).parent))
from kernels_cases import LAYOUTS, Case, cases

from arachnec.kernels import bias_gelu, norm_launch, rope_launch, row_launch
from arachnec.kernels.compile_estimate import Recorder
from arachnec.kernels.row_launch import Launch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKED_CHECK = 34328  # 1 + 1560 + 7 + 32760


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 32760, 118800])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1536, 3072, 5120])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--compile-at", type=int, nargs="*", default=[32760], help="tokens to time torch.compile at")
    parser.add_argument("--tune", action="store_true", help="search the launches of the norm kernels instead")
    parser.add_argument("--output", type=Path, help="keep the results here as JSON")
    arguments = parser.parse_args()
    for found in on_gpu(arguments) if torch.cuda.is_available() else [without_gpu(arguments)]:
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(found, indent=1) + "\n")


def on_gpu(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All that was found so far, again and again, so that a call that is cut off leaves what it had."""
    torch._functorch.config.donated_buffer = False  # else a compiled backward cannot be timed by itself
    torch._dynamo.config.recompile_limit = 256
    device, dtype = torch.device("cuda"), DTYPES[arguments.dtype]
    copy = copy_bandwidth(device)
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    head |= {"dtype": arguments.dtype, "copy_bytes_per_second": copy}
    print(f"{head['device']}, torch {torch.__version__}, triton {triton.__version__}; copy {copy / 1e12:.2f} TB/s")
    if arguments.tune:
        tuned = []
        for row in tune(arguments, dtype, device, copy):
            tuned.append(row)
            yield {**head, "tuned": tuned}
        return
    head["worst_error"] = check(arguments.hidden, dtype, device)
    results = []
    for hidden, layout, tokens in itertools.product(arguments.hidden, arguments.layouts, arguments.tokens):
        for case in cases(tokens, hidden, layout, dtype, device):
            results.append(measure(case, copy, tokens in arguments.compile_at))
            print(line(results[-1]), flush=True)
            yield {**head, "results": results}
        torch.cuda.empty_cache()
        torch._dynamo.reset()


def copy_bandwidth(device: torch.device) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_ms(lambda: target.copy_(source)) * 1e-3)


def time_ms(run: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(run, warmup=20, rep=100, return_mode="median"))


def check(hiddens: list[int], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The worst error of outputs and gradients against float64 eager, of each kernel; exits where one is too large."""
    worst: dict[str, float] = {}
    for hidden, layout in itertools.product(hiddens, LAYOUTS):
        for case in cases(PACKED_CHECK if layout == "packed" else 1560, hidden, layout, dtype, device):
            error = max(errors(case))
            worst[case.kernel] = max(error, worst.get(case.kernel, 0.0))
            if not error <= TOLERANCE[dtype]:
                sys.exit(f"{case.kernel}, {layout}, hidden size {hidden}: error {error:.1e}")
        torch.cuda.empty_cache()
    print("checked against float64: " + ", ".join(f"{kernel} {error:.1e}" for kernel, error in worst.items()))
    return worst


def errors(case: Case) -> Iterator[float]:
    exact = tuple(t.detach().double().requires_grad_() for t in case.tensors)
    outputs, truths = case.fused(*case.tensors), case.eager(*exact)
    outer = [torch.randn_like(output) for output in outputs]
    grads = torch.autograd.grad(outputs, case.tensors, outer)
    again = torch.autograd.grad(case.fused(*case.tensors), case.tensors, outer)
    true_grads = torch.autograd.grad(truths, exact, [t.double() for t in outer])
    for first, second in zip(grads, again, strict=True):
        yield 0.0 if torch.equal(first, second) else math.inf
    for got, truth in zip((*outputs, *grads), (*truths, *true_grads), strict=True):
        got, truth = got.detach(), truth.detach()
        yield float((got.double() - truth).abs().max() / truth.abs().max())


def measure(case: Case, copy: float, compiled: bool) -> dict[str, Any]:
    peers = {"fused": case.fused, "eager": case.eager}
    if compiled:
        peers["compiled"] = torch.compile(case.eager, mode="max-autotune-no-cudagraphs", dynamic=False)
    if case.kernel == "norm, modulate" and importlib.util.find_spec("liger_kernel"):
        peers["liger"] = liger(case)
    row: dict[str, Any] = {k: getattr(case, k) for k in ("kernel", "layout", "tokens", "hidden")}
    for name, run in peers.items():
        try:
            forward, backward = times(run, case.tensors)
        except torch.OutOfMemoryError:
            print(f"{name} needs more memory than there is", file=sys.stderr)
            continue
        row[name] = {"forward_ms": forward, "backward_ms": backward}
        row[name] |= {"forward_of_copy": case.forward_bytes / (forward * 1e-3) / copy}
        row[name] |= {"backward_of_copy": case.backward_bytes / (backward * 1e-3) / copy}
    return row


def times(run: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...]) -> tuple[float, float]:
    with torch.no_grad():
        forward = time_ms(lambda: run(*tensors))
    outputs = run(*tensors)
    outer = [torch.randn_like(output) for output in outputs]
    return forward, time_ms(lambda: torch.autograd.grad(outputs, tensors, outer, retain_graph=True))


def liger(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """Liger's layer norm, and the modulation, which it has not, in eager."""
    from liger_kernel.transformers.functional import liger_layer_norm

    weight, bias = torch.ones(case.hidden, device="cuda"), torch.zeros(case.hidden, device="cuda")
    lengths = cumulative_lengths(case)

    def run(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        scale, shift = (v if lengths is None else v.repeat_interleave(lengths, 0) for v in (scale, shift))
        return ((liger_layer_norm(x, weight, bias, 1e-6) * (1 + scale) + shift).to(x.dtype),)

    return run


def cumulative_lengths(case: Case) -> Tensor | None:
    from kernels_cases import segment_lengths

    return torch.tensor(segment_lengths(case.tokens), device="cuda") if case.layout == "packed" else None


def line(row: dict[str, Any]) -> str:
    text = f"{row['kernel']:31} {row['layout']:8} S {row['tokens']:6} H {row['hidden']:5}"
    for name in ("fused", "eager", "compiled", "liger"):
        if name in row:
            t = row[name]
            text += f" | {name} {t['forward_ms'] * 1e3:8.1f} us {t['forward_of_copy']:5.1%}"
            text += f", {t['backward_ms'] * 1e3:8.1f} us {t['backward_of_copy']:5.1%}"
    return text


def tune(
    arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device, copy: float
) -> Iterator[dict[str, Any]]:
    """The best launches of the norm kernels around the computed ones; what does not fit the device is passed over."""
    for hidden, layout, tokens in itertools.product(arguments.hidden, arguments.layouts, arguments.tokens):
        for case in cases(tokens, hidden, layout, dtype, device)[:2]:
            for name, bytes_moved in (("forward", case.forward_bytes), ("backward", case.backward_bytes)):
                chosen, default, best = search(case, name)
                row = {"kernel": case.kernel, "layout": layout, "tokens": tokens, "hidden": hidden, "pass": name}
                row |= {"launch": vars(chosen), "default_ms": default, "best_ms": best}
                row |= {"best_of_copy": bytes_moved / (best * 1e-3) / copy}
                print(json.dumps(row), flush=True)
                yield row
        torch.cuda.empty_cache()


def search(case: Case, name: str) -> tuple[Launch, float, float]:
    attribute = f"{name}_launch"
    computed = getattr(norm_launch, attribute)
    seen: list[Launch] = []

    def timed(change: Callable[[Launch], Launch]) -> float:
        def changed(*given: Any, **options: Any) -> Launch:
            seen.append(change(computed(*given, **options)))
            return seen[-1]

        setattr(norm_launch, attribute, changed)
        try:
            return times(case.fused, case.tensors)[name == "backward"]
        except triton.runtime.errors.OutOfResources:
            return math.inf
        finally:
            setattr(norm_launch, attribute, computed)

    default = timed(lambda launch: launch)
    best, chosen = default, seen[-1]
    for warps, stages, programs in itertools.product((4, 8, 16), (1, 3), (1, 2, 3, 4)):
        registers = min(255, 65536 // (32 * warps * programs) // 8 * 8)
        if registers < 64:
            continue
        slots = row_launch.device_of(case.tensors[0]).multiprocessors * programs * (4 if name == "forward" else 1)
        option = replace(chosen, warps=warps, stages=stages, registers=registers, slots=slots)
        found = timed(lambda _, option=option: option)
        if found < best:
            best, chosen = found, option
    return chosen, default, best


KERNELS = [
    (norm_launch, "norm_forward"),
    (norm_launch, "norm_backward"),
    (rope_launch, "rope_forward"),
    (rope_launch, "rope_backward"),
    (bias_gelu, "gelu_forward"),
    (bias_gelu, "gelu_backward"),
    (row_launch, "column_sums"),
]


@contextmanager
def recorded() -> Iterator[dict[str, Recorder]]:
    """Every kernel replaced by a recorder of its launches."""
    kernels = {name: getattr(module, name) for module, name in KERNELS}
    recorders = {name: Recorder(kernel) for name, kernel in kernels.items()}
    for module, name in KERNELS:
        setattr(module, name, recorders[name])
    try:
        yield recorders
    finally:
        for module, name in KERNELS:
            setattr(module, name, kernels[name])


def without_gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """What can be known without a device: registers, shared memory and spills for compute capability 9.0, and bytes."""
    print("no CUDA device: nothing is timed. Compiled for compute capability 9.0 by Triton's own compiler:")
    print("kernel         layout   hidden | registers, spilled bytes | shared bytes, warps | resident")
    results = []
    for hidden, layout in itertools.product(arguments.hidden, arguments.layouts):
        for launched in launches(hidden, layout, DTYPES[arguments.dtype]):
            results.append(launched)
            r = launched
            print(f"{r['kernel']:14} {layout:8} {hidden:6} | {r['registers']:3}, {r['spilled']:3} | {r['shared']:6}, {r['warps']:2} | {r['resident']:2}")  # fmt: skip  # noqa: E501
    print(f"\nbytes that one pass moves, for {arguments.dtype} rows")
    for hidden, tokens in itertools.product(arguments.hidden, arguments.tokens):
        for case in cases_on_meta(tokens, hidden, DTYPES[arguments.dtype]):
            print(f"{case.kernel:31} S {tokens:6} H {hidden:5} forward {case.forward_bytes / 1e6:8.1f} MB, backward {case.backward_bytes / 1e6:8.1f} MB")  # fmt: skip  # noqa: E501
    return {"device": "none: compiled for compute capability 9.0", "triton": triton.__version__, "results": results}


def cases_on_meta(tokens: int, hidden: int, dtype: torch.dtype) -> list[Case]:
    return cases(tokens, hidden, "batch 1", dtype, torch.device("meta"))


def launches(hidden: int, layout: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Estimates of every kernel that the cases launch, through the launchers themselves, on tensors without storage."""
    from kernels_launches import launch_all

    with recorded() as recorders:
        launch_all(hidden, layout, dtype)
    for name, recorder in recorders.items():
        for estimate in dict.fromkeys(recorder.estimates()):
            row = {"kernel": name, "layout": layout, "hidden": hidden, "resident": estimate.resident}
            yield row | vars(estimate)


if __name__ == "__main__":
    main()
