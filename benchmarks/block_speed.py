"""One transformer block, forward and backward: eager, torch.compile, our fused block, and ours under torch.compile.

    python benchmarks/block_speed.py --output benchmarks/results/blocks_h200.json   # a GPU: Wan2.1, 1.3B and 14B width
    python benchmarks/block_speed.py --device cpu --tiny                            # that the script works, and no more

Random weights, bf16, B = 1 and 512 caption tokens. Every form is compared with eager in output and gradients before
it is timed; a time is the median of --repeats after one warm-up, compilation apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # also where arachnec is not installed

from arachnec.codegen.fused_block import fuse_block
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.models.precision import in_precision
from arachnec.tracing.blocks import CapturedBlock, capture_blocks
from arachnec.tracing.captured import lifted
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.graph import block_graph
from arachnec.tracing.record import ExampleCall

# heads, feed-forward; heads of 128 values (FACTS: Wan-Video/Wan2.1, wan/configs)
MODELS = {"wan2_1_1_3b": (12, 8960), "wan2_1_14b": (40, 13824)}
TINY = {"tiny": (2, 64)}
CAPTION = 512
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-5}

Run = Callable[..., tuple[Tensor, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a block of width 32 in fp32, 48 tokens")
    parser.add_argument("--tokens", type=int, default=32760)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="keep the results here as JSON")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: --device cpu --tiny shows that the script works")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "results": []}
    for model, (heads, width) in (TINY if arguments.tiny else MODELS).items():
        for row in block_rows(model, heads, width, device, arguments):
            report["results"].append(row)
            print(line(row), flush=True)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    if any("failed" in row for row in report["results"]):
        sys.exit("some forms failed")


def block_rows(
    model: str, heads: int, width: int, device: torch.device, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """A row for each form as it is found; one that fails or differs from eager says so, and the others go on."""
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    tokens = 48 if arguments.tiny else arguments.tokens
    block, captured = captured_block(heads, 16 if arguments.tiny else 128, width, device, dtype)
    inputs = inputs_of(captured, {B: arguments.batch, S: tokens, T: 16 if arguments.tiny else CAPTION}, device)
    truth = step(lifted(captured, block), inputs, block)
    for form, run in forms(captured, block, device).items():
        torch._dynamo.reset()
        row = {"model": model, "form": form, "tokens": tokens, "batch": arguments.batch, "dtype": str(dtype)}
        try:
            row |= checked_and_timed(run, truth, inputs, block, device, arguments.repeats)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
        else:
            if not row["error"] <= TOLERANCE[dtype]:
                row["failed"] = f"differs from eager by {row['error']:.1e}"
        yield row


def checked_and_timed(
    run: Run, truth: list[Tensor], inputs: list[Tensor], block: torch.nn.Module, device: torch.device, repeats: int
) -> dict[str, float]:
    started = time.perf_counter()
    result = step(run, inputs, block)
    synchronize(device)
    first = time.perf_counter() - started
    error = max(relative(a, b) for a, b in zip(result, truth, strict=True))
    return {"error": error, "first_s": first, **timed(run, inputs, block, device, repeats)}


def captured_block(
    heads: int, size: int, width: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, CapturedBlock]:
    """A Wan2.1 block of this width, in the precision that a run gives it."""
    try:
        from diffusers import WanTransformer3DModel
    except ModuleNotFoundError:
        sys.exit("the blocks are those of Diffusers: pip install 'arachnec[diffusers]'")

    torch.manual_seed(0)
    with device:
        model = WanTransformer3DModel(
            num_attention_heads=heads, attention_head_dim=size, in_channels=16, out_channels=16, text_dim=64,
            freq_dim=32, ffn_dim=width, num_layers=1, cross_attn_norm=True, rope_max_seq_len=64,
        )  # fmt: skip
    model = in_precision(model, dtype) if dtype != torch.float32 else model

    def call(frames: int, columns: int, batch: int, text: int) -> ExampleCall:
        arguments = {
            "hidden_states": torch.randn(batch, 16, frames, 8, columns, device=device, dtype=dtype),
            "timestep": torch.linspace(1, 999, batch, device=device),
            "encoder_hidden_states": torch.randn(batch, text, 64, device=device, dtype=dtype),
            "return_dict": False,
        }
        return ExampleCall(arguments, (frames, 8, columns), batch, text)

    examples = [call(3, 12, 2, 19), call(5, 8, 2, 19), call(3, 16, 2, 19), call(3, 12, 3, 19), call(3, 12, 2, 23)]
    return model.blocks[0], capture_blocks(model, examples, verify=False).blocks[0]


def inputs_of(captured: CapturedBlock, sizes: dict[Any, int], device: torch.device) -> list[Tensor]:
    forms = []
    for dims, node, learned in zip(captured.input_dims, captured.input_nodes, captured.input_grads, strict=True):
        value = torch.randn([int(d.subs(sizes)) for d in dims], device=device).to(node.meta["val"].dtype)
        forms.append(value.requires_grad_(learned))
    return forms


def forms(captured: CapturedBlock, block: torch.nn.Module, device: torch.device) -> dict[str, Run]:
    """Without a GPU the kernels' plain form stands for them, so that the script is tried whole."""
    graph = fuse_graph(block_graph(captured))
    ours = fuse_block(captured, graph, kernels=True, compiler=None if device.type == "cuda" else lambda region: region)
    plain = fuse_block(captured, graph, kernels=True, compiler=lambda region: region)
    module = captured.graph_module
    return {
        "eager": lifted(captured, block),
        "torch.compile": lifted(captured, block, torch.compile(module, dynamic=False)),
        "ours": lifted(captured, block, ours),
        "ours + torch.compile": lifted(captured, block, torch.compile(plain, dynamic=False)),
    }


def step(run: Run, inputs: Sequence[Tensor], block: torch.nn.Module) -> list[Tensor]:
    """The output, and the gradients of inputs and parameters."""
    for tensor in (*inputs, *block.parameters()):
        tensor.grad = None
    output = run(*inputs)[0]
    output.backward(torch.ones_like(output))
    learned = (x for x in (*inputs, *block.parameters()) if x.grad is not None)
    return [output.detach(), *(x.grad.detach().clone() for x in learned if x.grad is not None)]


def relative(value: Tensor, truth: Tensor) -> float:
    size = torch.linalg.vector_norm(truth.float())
    return float(torch.linalg.vector_norm(value.float() - truth.float()) / size.clamp(min=1e-3))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(
    run: Run, inputs: Sequence[Tensor], block: torch.nn.Module, device: torch.device, repeats: int
) -> dict[str, float]:
    forward, both = [], []
    for _ in range(repeats + 1):
        for tensor in (*inputs, *block.parameters()):
            tensor.grad = None
        synchronize(device)
        started = time.perf_counter()
        output = run(*inputs)[0]
        synchronize(device)
        forward.append(time.perf_counter() - started)
        output.backward(torch.ones_like(output))
        synchronize(device)
        both.append(time.perf_counter() - started)
    return {"forward_ms": 1e3 * statistics.median(forward[1:]), "both_ms": 1e3 * statistics.median(both[1:])}


def line(row: dict[str, Any]) -> str:
    if "forward_ms" not in row:
        return f"{row['model']:12s} S={row['tokens']:6d} {row['form']:22s} failed: {row['failed']}"
    return (
        f"{row['model']:12s} S={row['tokens']:6d} {row['form']:22s} forward {row['forward_ms']:9.2f} ms   "
        f"with backward {row['both_ms']:9.2f} ms   from eager {row['error']:.1e}   first call {row['first_s']:.1f} s"
        + (f"   FAILED: {row['failed']}" if "failed" in row else "")
    )


if __name__ == "__main__":
    main()
