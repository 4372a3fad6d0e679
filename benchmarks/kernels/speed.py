"""Checks and times the Triton kernels; prints the fraction of the measured copy bandwidth each one reaches.

    python benchmarks/kernels --output benchmarks/results/kernels.json     # on a GPU: check, time, keep
    python benchmarks/kernels --tune                                       # on a GPU: search the launches
    python benchmarks/kernels                                              # elsewhere: registers and bytes only

A time is the median of what the GPU took for a call, with a cold L2 cache and without the host's launching. The
fraction is the bytes that one pass must move, over the time, over what a copy of 1 GiB moves in a second; beside it the
time of a copy of as many bytes over the time, for small ones. Beside the kernels: eager, Liger's layer norm where it is
installed, and torch.compile with max-autotune at the sizes of --compile-at, as far as --minutes allow: --hidden 5120
alone leaves it three times as long.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))  # also where arachnec is not installed
sys.path.insert(0, str(Path(__file__).parent))
from cases import KERNELS, LAYOUTS, Case, cases, segment_of
from estimates import without_gpu

from arachnec.kernels.rowwise import norm_launch, row_launch
from arachnec.kernels.rowwise.row_launch import Launch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEVICE = torch.device("cuda")
CHECKED = {"batch 1": 1560, "batch 4": 1560, "packed": 1 + 1560 + 7 + 32760}  # tokens
COPIED = 1 << 30  # bytes
WARM_UP, FEWEST, MOST = 3, 5, 30  # calls before a time, and that it is the median of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 32760, 118800])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1536, 3072, 5120])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--compile-at", type=int, nargs="*", default=[32760], help="tokens to time torch.compile at")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that may end later")
    parser.add_argument("--tune", action="store_true", help="search the launches of the norm kernels instead")
    parser.add_argument("--output", type=Path, help="keep the results here as JSON")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {}
    for rows in on_gpu(arguments) if torch.cuda.is_available() else [without_gpu(arguments, DTYPES[arguments.dtype])]:
        if arguments.output:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    if rows.get("wrong"):
        sys.exit("wrong: " + "; ".join(rows["wrong"]))


def on_gpu(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All that was found so far, again and again, so that a call that is cut off leaves what it had.

    First every kernel is checked, then kernels, eager and Liger are timed, and in the time that is left torch.compile.
    """
    end = time.monotonic() + 60 * arguments.minutes
    torch._functorch.config.donated_buffer = False  # else a compiled backward cannot be timed by itself
    torch._dynamo.config.recompile_limit = 256
    device, dtype = DEVICE, DTYPES[arguments.dtype]
    stopwatch = Stopwatch(device)
    copy = stopwatch.copy_bandwidth()
    head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    head |= {"dtype": arguments.dtype, "copy_bytes_per_second": copy}
    print(f"{head['device']}, torch {torch.__version__}, triton {triton.__version__}; copy {copy / 1e12:.2f} TB/s")
    if arguments.tune:
        tuned: list[dict[str, Any]] = []
        for row in tune(arguments, dtype, device, stopwatch, end):
            tuned.append(row)
            yield {**head, "tuned": tuned}
        return
    worst, wrong = check(arguments.hidden, arguments.layouts, dtype, device)
    head |= {"worst_error": worst, "wrong": wrong}
    rows: list[dict[str, Any]] = []
    yield {**head, "results": rows}
    for hidden, layout, tokens in itertools.product(arguments.hidden, arguments.layouts, arguments.tokens):
        for case in cases(tokens, hidden, layout, dtype, device):
            rows.append(measure(case, stopwatch, copy, end))
            print(line(rows[-1]), flush=True)
            if "fused" in rows[-1]["left_out"]:
                wrong.append(line(rows[-1]))
            del case
            torch.cuda.empty_cache()
            yield {**head, "results": rows}
    longest = 0.0
    for row in sorted((r for r in rows if r["tokens"] in arguments.compile_at), key=peers_wait_for):
        started = time.monotonic()
        if started + 1.5 * longest > end:
            row["left_out"]["compiled"] = "no time left: call again with fewer --hidden or --layouts"
        else:
            size = row["tokens"], row["hidden"], row["layout"]
            for case in cases(*size, dtype, device, (row["kernel"],)):
                measure_compiled(case, row, stopwatch, copy)
            longest = max(longest, time.monotonic() - started)
        print(line(row), flush=True)
        yield {**head, "results": rows}
    print(f"{sum('compiled' in r for r in rows)} of the rows have torch.compile beside them")


def peers_wait_for(row: dict[str, Any]) -> tuple[Any, ...]:
    """What torch.compile is timed at first: the norms with modulation, wide rows, every layout."""
    return KERNELS.index(row["kernel"]) >= 2, -row["hidden"], KERNELS.index(row["kernel"]), row["layout"]


class Stopwatch:
    """Times what a call does on the GPU: L2 is emptied before, and the GPU waits until the host has launched it all.

    L2 is emptied by reading, which leaves no lines to be written back during the call.
    """

    def __init__(self, device: torch.device) -> None:
        self.cold = torch.zeros(torch.cuda.get_device_properties(device).L2_cache_size, device=device)  # fp32: 4 times
        self.source, self.target = (torch.zeros(COPIED, dtype=torch.uint8, device=device) for _ in range(2))

    def ms(self, run: Callable[[], Any]) -> float:
        for _ in range(WARM_UP):
            run()
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        both = time.perf_counter() - started
        cycles = int(2e9 * (1.5 * (launched - started) + 1e-4))
        marks = []
        for _ in range(max(FEWEST, min(MOST, int(0.1 / both)))):
            self.cold.sum()
            torch.cuda._sleep(cycles)
            marks.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            marks[-1][0].record()
            run()
            marks[-1][1].record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in marks)

    def copy_bandwidth(self) -> float:
        """Bytes read and written a second, over the largest copy."""
        return 2 * self.source.numel() / (self.ms(lambda: self.target.copy_(self.source)) * 1e-3)

    def copy_ms(self, moved: int, bandwidth: float) -> float:
        """A copy that reads and writes as many bytes."""
        half = moved // 2
        if half > self.source.numel():
            return moved / bandwidth * 1e3
        return self.ms(lambda: self.target[:half].copy_(self.source[:half]))


def check(
    hiddens: list[int], layouts: list[str], dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, float], list[str]]:
    """The worst error of outputs and gradients against float64 eager, of each kernel; and which are too large."""
    worst: dict[str, float] = {}
    wrong: list[str] = []
    for hidden, layout in itertools.product(hiddens, layouts):
        for case in cases(CHECKED[layout], hidden, layout, dtype, device):
            error = max(errors(case))
            worst[case.kernel] = max(error, worst.get(case.kernel, 0.0))
            if not error <= TOLERANCE[dtype]:
                wrong.append(f"{case.kernel}, {layout}, hidden size {hidden}: error {error:.1e}")
                print(wrong[-1], flush=True)
        torch.cuda.empty_cache()
    print(
        "checked against float64: " + ", ".join(f"{kernel} {error:.1e}" for kernel, error in worst.items()), flush=True
    )
    return worst, wrong


def errors(case: Case) -> Iterator[float]:
    """Of every output and gradient, over the greatest value there; infinite where a second run has other bits."""
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


def measure(case: Case, stopwatch: Stopwatch, copy: float, end: float) -> dict[str, Any]:
    row: dict[str, Any] = {k: getattr(case, k) for k in ("kernel", "layout", "tokens", "hidden")}
    row |= {"copy_ms": [stopwatch.copy_ms(b, copy) for b in (case.forward_bytes, case.backward_bytes)], "left_out": {}}
    peers = {"fused": case.fused, "eager": case.eager}
    if case.kernel == "norm, modulate":
        if importlib.util.find_spec("liger_kernel"):
            peers["liger"] = liger(case)
        else:
            row["left_out"]["liger"] = "not installed"
    for name, run in peers.items():
        if name != "fused" and time.monotonic() > end:
            row["left_out"][name] = "no time left"
        else:
            fill(row, name, run, case, stopwatch, copy)
    return row


def measure_compiled(case: Case, row: dict[str, Any], stopwatch: Stopwatch, copy: float) -> None:
    run = torch.compile(case.eager, mode="max-autotune-no-cudagraphs", dynamic=False)
    fill(row, "compiled", run, case, stopwatch, copy)
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def fill(
    row: dict[str, Any],
    name: str,
    run: Callable[..., tuple[Tensor, ...]],
    case: Case,
    stopwatch: Stopwatch,
    copy: float,
) -> None:
    """The times of one form, or why there are none; an error of the device itself leaves nothing to go on with."""
    try:
        forward, backward = times(run, case.tensors, stopwatch)
    except torch.OutOfMemoryError:
        row["left_out"][name] = "needs more memory than there is"
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        row["left_out"][name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    else:
        row[name] = {"forward_ms": forward, "backward_ms": backward}
        row[name] |= {"forward_of_copy": case.forward_bytes / (forward * 1e-3) / copy}
        row[name] |= {"backward_of_copy": case.backward_bytes / (backward * 1e-3) / copy}
        ways = zip(("forward", "backward"), row["copy_ms"], (forward, backward), strict=True)
        row[name] |= {f"{way}_of_equal_copy": copied / spent for way, copied, spent in ways}


def times(
    run: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], stopwatch: Stopwatch
) -> tuple[float, float]:
    with torch.no_grad():
        forward = stopwatch.ms(lambda: run(*tensors))
    outputs = run(*tensors)
    outer = [torch.randn_like(output) for output in outputs]
    return forward, stopwatch.ms(lambda: torch.autograd.grad(outputs, tensors, outer, retain_graph=True))


def liger(case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """Liger's layer norm, and the modulation, which it has not, in eager."""
    from liger_kernel.transformers.functional import liger_layer_norm

    weight, bias = torch.ones(case.hidden, device=DEVICE), torch.zeros(case.hidden, device=DEVICE)
    segment = segment_of(case.tokens, DEVICE) if case.layout == "packed" else None

    def run(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        scale, shift = (v if segment is None else v.index_select(0, segment) for v in (scale, shift))
        return ((liger_layer_norm(x, weight, bias, 1e-6) * (1 + scale) + shift).to(x.dtype),)

    return run


def line(row: dict[str, Any]) -> str:
    """Microseconds, and percent of the copy bandwidth of 1 GiB / of a copy of as many bytes."""
    text = f"{row['kernel']:31} {row['layout']:8} S {row['tokens']:6} H {row['hidden']:5}"
    for name in ("fused", "eager", "compiled", "liger"):
        if name in row:
            t = row[name]
            for way, sign in (("forward", " | " + name), ("backward", ",")):
                text += (
                    f"{sign} {t[way + '_ms'] * 1e3:.1f} us {t[way + '_of_copy']:.0%}/{t[way + '_of_equal_copy']:.0%}"
                )
    return text + "".join(f" | {name}: {why}" for name, why in row["left_out"].items())


def tune(
    arguments: argparse.Namespace, dtype: torch.dtype, device: torch.device, stopwatch: Stopwatch, end: float
) -> Iterator[dict[str, Any]]:
    """The best launches of the norm kernels around the computed ones; what does not fit the device is passed over."""
    copy = stopwatch.copy_bandwidth()
    for hidden, layout, tokens in itertools.product(arguments.hidden, arguments.layouts, arguments.tokens):
        for case in cases(tokens, hidden, layout, dtype, device, KERNELS[:2]):
            for name, bytes_moved in (("forward", case.forward_bytes), ("backward", case.backward_bytes)):
                if time.monotonic() > end:
                    return
                chosen, default, best = search(case, name, stopwatch)
                row = {"kernel": case.kernel, "layout": layout, "tokens": tokens, "hidden": hidden, "pass": name}
                row |= {"launch": vars(chosen), "default_ms": default, "best_ms": best}
                row |= {"best_of_copy": bytes_moved / (best * 1e-3) / copy}
                print(json.dumps(row), flush=True)
                yield row
        torch.cuda.empty_cache()


def search(case: Case, name: str, stopwatch: Stopwatch) -> tuple[Launch, float, float]:
    attribute = f"{name}_launch"
    computed = getattr(norm_launch, attribute)
    seen: list[Launch] = []

    def timed(change: Callable[[Launch], Launch]) -> float:
        def changed(*given: Any, **options: Any) -> Launch:
            seen.append(change(computed(*given, **options)))
            return seen[-1]

        setattr(norm_launch, attribute, changed)
        try:
            return times(case.fused, case.tensors, stopwatch)[name == "backward"]
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
        ms = timed(lambda _, option=option: option)
        if ms < best:
            best, chosen = ms, option
    return chosen, default, best


if __name__ == "__main__":
    main()
